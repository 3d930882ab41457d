"""What the tests of the search share: small problems, by hand and drawn, and their optima by brute force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Kind
from plait.schedules.check import check
from plait.schedules.costs import Cost, Costs
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search import auto_search
from plait.schedules.search.memory_guard import least_memory
from plait.schedules.search.problem import Orders, Problem, StageLayout
from plait.schedules.search.schedule_by_policy import schedule

LINEAR: StageLayout = (Placement.LINEAR, 1)
V: StageLayout = (Placement.V, 2)
LOOP: StageLayout = (Placement.LOOP, 2)
ROOMY = 10**9


def problem_of(
    layout: StageLayout = LINEAR,
    ranks: int = 2,
    microbatches: int = 2,
    costs: Costs | None = None,
    limit: int = ROOMY,
    of_span: bool = False,
) -> Problem:
    """A problem in a line; `limit` in units of what the costs hold."""
    (placement, chunks), costs = layout, costs or Costs()
    ticks, holds = costs.ticks(ranks, ranks * chunks), costs.memory(ranks, ranks * chunks)
    return Problem(placement, ranks, chunks, microbatches, ticks, holds, limit, of_span)


def operations(problem: Problem, *rows: str) -> Orders:
    """The orders in `rows`, for one stage a rank: `"F0 F1 I0 W0"`."""
    kinds = {"F": 0, "I": 1, "W": 2}
    return [
        [(3 * rank + kinds[word[0]]) * problem.microbatches + int(word[1:]) for word in row.split()]
        for rank, row in enumerate(rows)
    ]


def words(problem: Problem, orders: Orders) -> list[str]:
    """The inverse of `operations`."""
    rows = problem.actions_of(orders)
    return [" ".join(f"{action.kind}{action.microbatch}" for action in row) for row in rows]


def schedule_of(problem: Problem, orders: Orders) -> Schedule:
    rows = tuple(map(tuple, problem.actions_of(orders)))
    return Schedule("test", problem.microbatches, problem.rank_of, rows)


def require_legal(problem: Problem, orders: Orders) -> None:
    """Every rule of schedules, and the problem's memory limit."""
    check(
        schedule_of(problem, orders), float(problem.limit * problem.memory_costs.unit), problem.memory_costs
    )


def searched(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    limit: float | None = None,
    chunks: int | None = None,
    measure: auto_search.Measure = "makespan",
    budget: int = 2000,
    nodes: int = 300,
) -> Timeline:
    """What `auto` finds, in time, with so little budget that properties can be tested on many cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_search, "BUDGET", budget)
        patch.setattr(auto_search, "PER_START", 2)
        patch.setattr(auto_search, "EXACT_NODES", nodes)
        made = schedule(
            "auto",
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks,
            costs=costs,
            limit=limit,
            measure=measure,
        )
    return simulate(made, costs)


def times() -> st.SearchStrategy[float]:
    """Costs in decimals, plain ones and zeros often."""
    return st.sampled_from((0, 1, 0.5, 2)) | st.integers(0, 300).map(lambda hundredths: hundredths / 100)


@st.composite
def any_costs(draw: st.DrawFn, stages: int = 0, growing: bool = True) -> Costs:
    """Numbers for all stages, or with `stages` now and then one number for each; memory that grows with an
    input gradient only if it may."""

    def cost() -> Cost:
        each = stages and draw(st.booleans())
        return [draw(times()) for _ in range(stages)] if each else draw(times())

    until_input = cost()
    until_weight = cost() if growing else _parts(draw, until_input)
    return Costs(cost(), cost(), cost(), draw(times()), until_input, until_weight)


def _parts(draw: st.DrawFn, amounts: Cost) -> Cost:
    if isinstance(amounts, Sequence):
        return [amount * draw(st.sampled_from((0, 0.5, 1))) for amount in amounts]
    return amounts * draw(st.sampled_from((0, 0.5, 1)))


ANY_SIZE = (
    *(((Placement.LINEAR, 1), ranks, microbatches) for ranks in (1, 2, 4) for microbatches in (1, 3, 6)),
    *(((Placement.V, 2), ranks, microbatches) for ranks in (1, 2, 3) for microbatches in (1, 4)),
    *(((Placement.LOOP, 2), ranks, microbatches) for ranks in (1, 2, 3) for microbatches in (1, 4)),
    *(((placement, 3), 2, 3) for placement in (Placement.V, Placement.LOOP)),
)
TINY = (
    (LINEAR, 1, 3),
    (LINEAR, 2, 2),
    (LINEAR, 2, 3),
    (LINEAR, 2, 4),
    (LINEAR, 3, 2),
    (LINEAR, 3, 3),
    (V, 1, 2),
    (V, 2, 1),
    (V, 2, 2),
    (LOOP, 2, 1),
    (LOOP, 2, 2),
    ((Placement.LOOP, 3), 1, 2),
)
"""What brute force can do in little time."""
Size = tuple[StageLayout, int, int]
"""Layout, ranks, micro-batches."""


@st.composite
def problems(draw: st.DrawFn, sizes: Sequence[Size] = ANY_SIZE, growing: bool = True) -> Problem:
    """A problem of one of these sizes, with a limit from the least with which it can be run to any."""
    layout, ranks, microbatches = draw(st.sampled_from(sizes))
    costs = draw(any_costs(ranks * layout[1], growing=growing))
    of_span = draw(st.booleans())
    roomy = problem_of(layout, ranks, microbatches, costs, of_span=of_span)
    least = max(least_memory(roomy, rank) for rank in range(ranks))
    most = microbatches * sum(map(max, roomy.memory_costs.until_input, roomy.memory_costs.until_weight))
    limit = draw(st.just(least) | st.integers(least, most))
    return problem_of(layout, ranks, microbatches, costs, limit, of_span)


class State(NamedTuple):
    """Part of a schedule: what is done, and what the rest depends on."""

    done: tuple[int, ...]
    """Per lane, as in a problem: three a stage."""
    begun: tuple[int, ...]
    """Per rank: when its first operation started; -1 before that."""
    results: tuple[tuple[int, int], ...]
    """Lane and micro-batch of all that another stage still waits for."""


Times = tuple[int, ...]
"""When each rank is free, then when each result was there."""


def shortest(problem: Problem) -> int | None:
    """The least makespan or span over all schedules, in ticks, by trying all; None if there is none.

    Which orders there are and when things happen is worked out a second time here, without any search's help;
    of parts that have done the same, those are left out that were later in everything.
    """
    lanes = 3 * problem.stages
    start = State((0,) * lanes, (-1,) * problem.ranks, ())
    states: dict[State, list[Times]] = {start: [(0,) * problem.ranks]}
    for _ in range(lanes * problem.microbatches):
        found: dict[State, set[Times]] = defaultdict(set)
        for state, all_times in states.items():
            for times in all_times:
                for after, then in _continued(problem, state, times):
                    found[after].add(then)
        states = {state: _not_later(all_times) for state, all_times in found.items()}
    lengths = [
        max(map(int.__sub__, times[: problem.ranks], state.begun if problem.of_span else [0] * problem.ranks))
        for state, all_times in states.items()
        for times in all_times
    ]
    return min(lengths, default=None)


def _not_later(all_times: set[Times]) -> list[Times]:
    kept: list[Times] = []
    for times in sorted(all_times):
        if not any(all(map(int.__le__, other, times)) for other in kept):
            kept.append(times)
    return kept


def _continued(problem: Problem, state: State, times: Times) -> Iterator[tuple[State, Times]]:
    """With one operation more, whichever can be done."""
    for lane, number in enumerate(state.done):
        stage, kind = divmod(lane, 3)
        rank = problem.rank_of[stage]
        if number == problem.microbatches or (kind and state.done[lane - 1] == number):
            continue
        done = _with(state.done, lane, number + 1)
        if _held(problem, done, rank) > problem.limit:
            continue
        ends = dict(zip(state.results, times[problem.ranks :], strict=True))
        start = times[rank]
        source = stage - 1 if kind == 0 else stage + 1
        if kind < 2 and 0 <= source < problem.stages:
            end = ends.pop((3 * source + kind, number), None)
            if end is None:
                continue
            start = max(start, end + (problem.ticks.comm if problem.rank_of[source] != rank else 0))
        end = start + problem.ticks.durations[(Kind.F, Kind.I, Kind.W)[kind]][stage]
        if (kind == 0 and stage + 1 < problem.stages) or (kind == 1 and stage):
            ends[lane, number] = end
        results = tuple(sorted(ends))
        free = _with(times[: problem.ranks], rank, end)
        begun = state.begun if state.begun[rank] >= 0 else _with(state.begun, rank, start)
        yield State(done, begun, results), (*free, *(ends[result] for result in results))


def _held(problem: Problem, done: tuple[int, ...], rank: int) -> int:
    held = 0
    for stage in problem.stages_of[rank]:
        forwards, inputs, weights = done[3 * stage : 3 * stage + 3]
        held += (forwards - inputs) * problem.memory_costs.until_input[stage]
        held += (inputs - weights) * problem.memory_costs.until_weight[stage]
    return held


def _with(row: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*row[:index], value, *row[index + 1 :])
