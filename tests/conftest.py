"""What all tests share: ranks, as threads or as one pool of processes; how examples are drawn."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from plait.comm.pool import RankPool
from plait.comm.rank_threads import run_threads


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # Without the full products, examples are few and the same each time: what fails was broken by a change,
    # not drawn by bad luck. `make test-all` explores. No deadline: times are noisy, and no test asserts one.
    fixed = "not full" in config.option.markexpr
    profile = {"derandomize": True, "max_examples": 50} if fixed else {"max_examples": 100}
    hypothesis.settings.register_profile("plait", deadline=None, **profile)
    hypothesis.settings.load_profile("plait")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers, one pool: what needs processes runs on one worker, in its order, all else beside it."""
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Local CPU ranks: `rank_pool.run(function, *arguments, ranks=4)`; they start when asked for."""
    with RankPool(8, threads=1, timeout=60.0, device="cpu") as pool:
        yield pool


class ThreadRanks:
    """Ranks as threads of the test's own process, asked as a `RankPool` is.

    What meta runs have shown of layers is kept from one test to the next: many tests build the same model.
    """

    def __init__(self) -> None:
        self._shared_results: dict[Hashable, Any] = {}

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """Return what `function(*arguments)` returns on each rank; one thread of torch each."""
        return run_threads(function, arguments, ranks, 1, self._shared_results)


@pytest.fixture(scope="session")
def thread_ranks() -> ThreadRanks:
    """Ranks without processes, for what does not depend on how bytes travel: quick, on either worker."""
    return ThreadRanks()
