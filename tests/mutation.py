"""Runs the tests on a plait with one mistake in it, to see that they turn red. A plugin of pytest:

    PYTHONPATH=tests MUTATION=zoo.forward.mlp_averaged .venv/bin/pytest -p mutation -x

The mistake is one of the zoo or of `parity/defects.py` and `parity/tensor_defects.py`, entered for the whole
session, in the test's process (and so in ranks as threads) and in the ranks of each pool of processes. Tests
that compare by `plait verify` are left out, and those that enter a mistake themselves. `drawn` chooses.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import pytest

from plait.ranks.launch.rank_pool import RankPool

LEFT_OUT = (
    "tests/zoo/",
    "tests/unit/verification/",
    "verify",
    "_defects.py",
    "compare",
    "tests/test_docs.py",
)
"""Parts of the names of tests that compare with the verifier, or run on mistakes of their own."""


def drawn(seed: int, number: int) -> list[str]:
    """Return the names of `number` mistakes at random, of those of the zoo and of parity's defects.

    Left out are the zoo's mistakes in a user's model or loss: they patch nothing of plait.
    """
    from parity.defects import DEFECTS
    from parity.tensor_defects import TENSOR_DEFECTS
    from zoo.test_zoo import ROWS

    defects = {row.defect for row in ROWS} | {*DEFECTS, *TENSOR_DEFECTS}
    patches = {defect for defect in defects if not (defect.__doc__ or "").startswith("No patch")}
    all_names = sorted({(defect.__module__, defect.__name__) for defect in defects})
    names = {(defect.__module__, defect.__name__) for defect in patches}
    order = random.Random(seed).sample(all_names, len(all_names))
    return sorted(".".join(name) for name in [name for name in order if name in names][:number])


def defect_of(name: str) -> Callable[[], AbstractContextManager[object]]:
    """Return a mistake by its module and name."""
    module, _, defect = name.rpartition(".")
    found: Callable[[], AbstractContextManager[object]] = getattr(import_module(module), defect)
    return found


def call_within(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a rank's process while the mistake is entered."""
    with defect_of(name)():
        return function(*arguments)


def pytest_configure(config: pytest.Config) -> None:
    name = os.environ["MUTATION"]
    entered = defect_of(name)()
    entered.__enter__()
    config.add_cleanup(lambda: entered.__exit__(None, None, None))
    original = RankPool.run

    def run(self: RankPool, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return original(self, call_within, name, function, *arguments, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(RankPool, "run", run)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not any(part in item.nodeid for part in LEFT_OUT)]


if __name__ == "__main__":
    print("\n".join(drawn(22, 25)))
