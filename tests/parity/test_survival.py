"""Runs to which failures happen anywhere end with the bits of the run to which none does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import plait
from plait.errors import PlaitError
from plait.ranks.launch.elastic.options import Elastic

FOLDER = Path(__file__).parents[2] / "benchmarks" / "survive"
STEPS = 8
LIMIT = 4.0
"""Seconds after which a rank hangs."""
NAMES = ("full", "both", "pipeline", "tensor", "all")
Undisturbed = Callable[[str], Any]


def cases(turns: int, quick: Collection[str]) -> list[Any]:
    """Return names of plans and turns; the first turn of the `quick` plans is no full test."""
    return [
        pytest.param(
            name, turn, marks=() if name in quick and not turn else pytest.mark.full, id=f"{name}-{turn}"
        )
        for turn in range(turns)
        for name in NAMES
    ]


@pytest.fixture(scope="module")
def survive() -> Iterator[Any]:
    """The names of the benchmark's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        found = SimpleNamespace()
        for name in ("injections", "injected_run"):
            vars(found).update(vars(import_module(name)))
        yield found


@pytest.fixture(scope="module")
def undisturbed(survive: Any, thread_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses by step, and results, of a run without failures."""

    @cache
    def run(name: str) -> Any:
        folder, case = tmp_path_factory.mktemp(name), survive.Case((name,), STEPS)
        results = thread_ranks.run(
            survive.train, folder, case, survive.Injector(folder, ()), ranks=case.ranks
        )
        return {step: loss for step, _, _, loss in survive.steps_of(folder)}, results

    return run


def case_of(survive: Any, name: str, kinds: Sequence[str], seeds: range, every: int) -> Any:
    """A run with a failure of each seed, of one of the `kinds` in turns."""
    drawn = [
        survive.drawn(seed, kinds[seed % len(kinds)], survive.PLANS[name], steps=STEPS, every=every)
        for seed in seeds
    ]
    return survive.Case((name,), STEPS, every, tuple(dict.fromkeys(chain.from_iterable(drawn))))


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("name", "turn"), cases(2, ("full", "pipeline")))
def test_errors_anywhere_change_no_bit(
    survive: Any, thread_ranks: Any, undisturbed: Undisturbed, tmp_path: Path, name: str, turn: int
) -> None:
    case = case_of(survive, name, ["error"], range(9 * turn, 9 * turn + 9), 2)
    injector, results = survive.Injector(tmp_path, case.injections), None
    with injector.patched():
        for _ in range(len(case.injections) + 1):  # at most one generation for each failure, and the last
            with suppress(PlaitError):
                results = thread_ranks.run(survive.train, tmp_path, case, injector, ranks=case.ranks)
                break
    assert injector.left == []
    assert results is not None
    assert survive.differences(case, tmp_path, results, *undisturbed(name)) == []


@pytest.mark.parametrize(("name", "turn"), cases(4, ("full",)))
def test_signals_anywhere_change_no_bit(
    survive: Any, undisturbed: Undisturbed, tmp_path: Path, name: str, turn: int
) -> None:
    """With a spare: it takes the place of the first lost rank, new processes those of the others."""
    case = case_of(survive, name, ["kill"] * 5 + ["stop"], range(6 * turn, 6 * turn + 6), 1)
    results = plait.launch(
        survive.train,
        tmp_path,
        case,
        ranks=case.ranks,
        device="cpu",
        timeout=LIMIT,
        elastic=Elastic(spares=1),
    )
    assert survive.Injector(tmp_path, case.injections).left == []
    assert survive.differences(case, tmp_path, results, *undisturbed(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("names", [("both", "three", "full"), ("all", "three", "pipeline")])
def test_runs_on_fewer_and_fewer_ranks_compute_the_same(
    survive: Any, undisturbed: Undisturbed, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """4, 3 and 2 ranks."""
    kills = tuple(survive.Injection("kill", "norm", step, rank) for step, rank in ((2, 3), (5, 0)))
    case = survive.Case(names, STEPS, 2, kills)
    results = plait.launch(
        survive.train, tmp_path, case, ranks=4, device="cpu", timeout=LIMIT, elastic=Elastic(replace=False)
    )
    assert len(results) == 2
    assert survive.differences(case, tmp_path, results, *undisturbed(names[0])) == []
