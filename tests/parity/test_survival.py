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
from benchmark_modules import find_modules_of
from plait.errors import PlaitError
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.supervisor import Supervisor

FOLDER = Path(__file__).parents[2] / "benchmarks" / "survive"
STEPS = 8
ERRORS = 5
"""Failures of a run whose ranks are threads."""
LIMIT = 4.0
"""Seconds after which a rank hangs."""
NAMES = ("full", "both", "pipeline", "tensor", "all", "replicas")
Undisturbed = Callable[..., Any]


def cases(turns: int, quick: Collection[str], quick_turn: int = 0) -> list[Any]:
    """Return names of plans and turns; one turn of the `quick` plans is no full test."""
    return [
        pytest.param(
            name,
            turn,
            marks=() if name in quick and turn == quick_turn else pytest.mark.full,
            id=f"{name}-{turn}",
        )
        for turn in range(turns)
        for name in NAMES
    ]


@pytest.fixture(scope="module")
def survive() -> Iterator[Any]:
    """The names of the benchmark's modules."""
    with pytest.MonkeyPatch.context() as patch:
        find_modules_of(FOLDER, patch)
        found = SimpleNamespace()
        for name in ("injections", "injected_run"):
            vars(found).update(vars(import_module(name)))
        yield found


@pytest.fixture(scope="module")
def undisturbed(survive: Any, thread_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses by step, and results, of a run without failures."""

    @cache
    def run(name: str, steps: int = STEPS) -> Any:
        folder, case = tmp_path_factory.mktemp(name), survive.Case((name,), steps)
        results = thread_ranks.run(
            survive.train, folder, case, survive.Injector(folder, ()), ranks=case.ranks
        )
        return dict(survive.steps_of(folder)), results

    return run


def case_of(survive: Any, name: str, kinds: Sequence[str], seeds: range, every: int) -> Any:
    """A run with a failure of each seed, of one of the `kinds` in turns."""
    drawn = [
        survive.drawn(seed, kinds[seed % len(kinds)], survive.PLANS[name], steps=STEPS, every=every)
        for seed in seeds
    ]
    return survive.Case((name,), STEPS, every, tuple(dict.fromkeys(chain.from_iterable(drawn))))


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("name", "turn"), cases(4, ("full",)))
def test_errors_anywhere_change_no_bit(
    survive: Any, thread_ranks: Any, undisturbed: Undisturbed, tmp_path: Path, name: str, turn: int
) -> None:
    case = case_of(survive, name, ["error"], range(ERRORS * turn, ERRORS * (turn + 1)), 2)
    injector, results = survive.Injector(tmp_path, case.injections), None
    with injector.patched():
        for _ in range(len(case.injections) + 1):  # at most one generation for each failure, and the last
            with suppress(PlaitError):
                results = thread_ranks.run(survive.train, tmp_path, case, injector, ranks=case.ranks)
                break
    assert injector.left == []
    assert results is not None
    assert survive.differences(case, tmp_path, results, *undisturbed(name)) == []


@pytest.mark.parametrize(("name", "turn"), cases(12, ("full",), quick_turn=2))
def test_signals_anywhere_change_no_bit(
    survive: Any, undisturbed: Undisturbed, tmp_path: Path, name: str, turn: int
) -> None:
    """With a spare: it takes the place of the first lost rank, new processes those of the others."""
    case = case_of(survive, name, ["kill"] * 5 + ["stop"], range(2 * turn, 2 * turn + 2), 1)
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


LARGER_AGAIN = [
    ("both", "three", "full"),
    ("replicas", "three", "tensor"),
    ("all", "three", "pipeline"),
    ("four", "stages", "pipeline"),
]
"""Plans of 4, 3 and 2 ranks."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", LARGER_AGAIN, ids="-".join)
def test_runs_on_fewer_ranks_become_larger_again_and_compute_the_same(
    survive: Any,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    """4, 3, 2 and 4 ranks: the larger world has the state that the smaller one had, which it did not load."""
    start_when_two_are_lost(monkeypatch)
    kills = tuple(survive.Injection("kill", "norm", step, rank) for step, rank in ((2, 3), (5, 0)))
    case = survive.Case(names, 10, 2, kills, grows_before=5)
    results = plait.launch(
        survive.train, tmp_path, case, ranks=4, device="cpu", timeout=LIMIT, elastic=Elastic(replace="later")
    )
    assert [one["ranks"] for one in results] == [4] * 4
    generations = survive.generations_of(tmp_path)
    assert [world for _, world, _ in generations[:4]] == [4, 3, 2, 4]
    larger = generations[3][:2]  # begun after step 6, or later where new processes take long to start
    assert {moved for *begun, moved in generations if tuple(begun) == larger} == {True}
    assert survive.differences(case, tmp_path, results, *undisturbed(names[0], 10)) == []


def start_when_two_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the supervisor start new processes in the third world, and not earlier."""
    may_start = Supervisor._may_start
    monkeypatch.setattr(
        Supervisor,
        "_may_start",
        lambda agent, count: (agent._host.generation == 3) and may_start(agent, count),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "place"), [("error", "reshard"), ("kill", "reshard"), ("stop", "reshard"), ("kill", "leave")]
)
@pytest.mark.parametrize("names", LARGER_AGAIN, ids="-".join)
def test_a_failure_while_ranks_become_more_changes_nothing(
    survive: Any, undisturbed: Undisturbed, tmp_path: Path, names: tuple[str, ...], kind: str, place: str
) -> None:
    first = survive.Injection("kill", "norm", 2, 3)
    case = survive.Case(names, STEPS, 2, (first, survive.Injection(kind, place, 2, 1)), grows_before=3)
    results = plait.launch(
        survive.train, tmp_path, case, ranks=4, device="cpu", timeout=LIMIT, elastic=Elastic(replace="later")
    )
    assert survive.Injector(tmp_path, case.injections).left == []
    assert survive.differences(case, tmp_path, results, *undisturbed(names[0])) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["replicas", "shards"])
def test_no_step_is_computed_again_where_replicas_hold_the_whole_state(
    survive: Any, undisturbed: Undisturbed, tmp_path: Path, name: str
) -> None:
    """Snapshots are further apart than the run is long; a spare joins those that are left."""
    kills = tuple(survive.Injection("kill", "norm", step, rank) for step, rank in ((3, 1), (5, 2)))
    case = survive.Case((name,), STEPS, STEPS + 1, kills, checks=True)
    results = plait.launch(
        survive.train, tmp_path, case, ranks=4, device="cpu", timeout=LIMIT, elastic=Elastic(spares=1)
    )
    assert [moved for _, _, moved in survive.generations_of(tmp_path)[:3]] == [False, True, True]
    steps = [step for step, _ in survive.steps_of(tmp_path)]
    assert sorted(set(steps)) == [*range(STEPS)]
    assert max(map(steps.count, steps)) <= 4
    assert survive.differences(case, tmp_path, results, *undisturbed(name)) == []
