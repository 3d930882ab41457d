"""The search for `auto`: the shortest schedule within a memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs, is_within, limit_in_units
from plait.schedules.named_schedules import POLICIES, BlockPolicy, policies_for, policy_schedule
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search.exact_search import exact_search
from plait.schedules.search.local_search import fit_block_policy, local_search, shortened_problem
from plait.schedules.search.lower_bound import lower_bound
from plait.schedules.search.memory_guard import least_memory
from plait.schedules.search.problem import Orders, Problem, StageLayout
from plait.schedules.timed_schedule import Cell, TimedSchedule, simulated

Measure = Literal["makespan", "span"]
MOST_CHUNKS = 4
"""Largest number of chunks that is tried by default."""
BUDGET = 800_000
"""Least number of operations that a search schedules: a second or two."""
PER_OPERATION, MOST_BUDGET = 150, 4_000_000
"""Budget for each operation of the largest problem in larger pipelines, up to some seconds."""
PER_START, PER_FINAL = 20, 12
"""Budget for each operation of all short runs, and of the largest problem, in the largest pipelines."""
BLOCK_SIZE = 10_000
"""Largest problem for which building-block policies are candidates as they are."""
EXACT_SIZE, EXACT_NODES = 160, 20_000
"""Largest problem that is searched exactly, and number of nodes for all of them."""


def search_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float,
    chunks: Sequence[int],
    measure: Measure,
    rank_of: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule with the least `measure` (makespan or span) found within the memory `limit`.

    Its `policy` has the placement of its stages, or the name of the policy; its `bound` is a lower bound,
    equal to its own measure where nothing better exists. The result is the same on every machine. `chunks`:
    allowed numbers of stages per rank; `rank_of`: required rank of each stage. Raises ScheduleError for a
    limit below what any schedule needs, and for a `rank_of` that is neither a loop nor a v.
    """
    layouts = list(_stage_layouts(ranks, costs, chunks))
    if rank_of is not None:
        layouts = _with_rank_of(layouts, ranks, rank_of)
    problems = _problems(ranks, microbatches, costs, limit, layouts, measure)
    found = [
        _schedule(candidate.problem, candidate.timed.orders)
        for candidate in local_search(problems, _budget(problems))
    ]
    found += _fitting_policies(problems, costs, limit)
    best = min(
        (simulated(schedule, costs) for schedule in found), key=lambda timeline: _score(timeline, measure)
    )
    best, bound = _searched_exactly(problems, best, costs, measure)
    return replace(fuse_backward(best.schedule, costs), bound=float(bound))


def _score(timeline: TimedSchedule, measure: Measure) -> tuple[Fraction, Fraction, int]:
    """Return the sort key of a timeline: makespan and span (`measure` first), then the number of stages."""
    first, second = timeline.length, timeline.longest
    if measure == "span":
        first, second = second, first
    return first * timeline.tick, second * timeline.tick, timeline.schedule.stages


def _with_rank_of(layouts: Sequence[StageLayout], ranks: int, rank_of: Sequence[int]) -> list[StageLayout]:
    fits = [layout for layout in layouts if layout[0].rank_of(ranks, layout[1]) == tuple(rank_of)]
    if not fits:
        raise ScheduleError(
            f"rank_of is {list(rank_of)}, and auto searches orders for a loop (0, 1, 0, 1) or a V "
            "(0, 1, 1, 0) only: give one of these."
        )
    return fits[:1]


def _problems(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float,
    layouts: Iterable[StageLayout],
    measure: Measure,
) -> list[Problem]:
    """Return a search problem for each stage layout (placement, chunks) that fits into the memory limit."""
    problems, least = [], Fraction(0)
    for placement, count in layouts:
        stages = ranks * count
        holds, ticks = costs.memory(ranks, stages), costs.ticks(ranks, stages)
        everything = microbatches * sum(map(max, holds.until_input, holds.until_weight))
        most = min(limit_in_units(limit, holds.unit), everything)
        problem = Problem(placement, ranks, count, microbatches, ticks, holds, most, measure == "span")
        needed = max(least_memory(problem, rank) for rank in range(ranks))
        if needed <= most:
            problems.append(problem)
        elif least == 0 or needed * holds.unit < least:
            least = needed * holds.unit
    if not problems:
        raise ScheduleError(
            f"limit is {limit}, less than any schedule needs: give at least {float(least):g}."
        )
    return problems


def chunk_counts(ranks: int, layers: int | None = None) -> Sequence[int]:
    """Return the numbers of stages per rank to try; given `layers`, at least one layer per stage."""
    most = MOST_CHUNKS if layers is None else min(MOST_CHUNKS, layers // ranks)
    return range(1, max(most, 1) + 1)


def _stage_layouts(ranks: int, costs: Costs, chunks: Sequence[int]) -> Iterator[StageLayout]:
    every = (costs.F, costs.I, costs.W, costs.until_I, costs.until_W)
    lengths = {len(cost) for cost in every if isinstance(cost, Sequence)}
    if len(chunks) > 1 and lengths:
        chunks = (max(min(lengths) // ranks, 1),)  # costs of another length are refused where they are read
    for count in chunks:
        if count == 1:
            yield Placement.LINEAR, 1
        else:
            yield Placement.V, count
            yield Placement.LOOP, count


def _budget(problems: Sequence[Problem]) -> float:
    largest = max(problem.size for problem in problems)
    if len(problems) == 1:
        largest *= 2  # screening is short then: more budget for perturbation
    starts = sum(shortened_problem(problem).size for problem in problems)
    return max(BUDGET, min(PER_OPERATION * largest, MOST_BUDGET), PER_START * starts + PER_FINAL * largest)


def _schedule(problem: Problem, orders: Orders) -> Schedule:
    chunks = "" if problem.chunks == 1 else f", {problem.chunks} chunks"
    actions = problem.actions_of(orders)
    return Schedule(f"auto ({problem.placement}{chunks})", problem.microbatches, problem.rank_of, actions)


def _fitting_policies(problems: Sequence[Problem], costs: Costs, limit: float) -> Iterator[Schedule]:
    """Yield the schedules of named policies that stay within the memory limit."""
    for problem in problems:
        for name in policies_for(problem.placement, problem.chunks):
            policy = POLICIES[name]
            if isinstance(policy, BlockPolicy) and problem.size > BLOCK_SIZE:
                continue
            made = policy_schedule(name, problem.ranks, problem.microbatches, problem.chunks)
            if isinstance(policy, BlockPolicy):
                made = fit_block_policy(made, policy, costs)
            if is_within(made, limit, costs.memory(made.ranks, made.stages)):
                yield replace(made, policy=f"auto ({name})")


def _searched_exactly(
    problems: Sequence[Problem], best: TimedSchedule, costs: Costs, measure: Measure
) -> tuple[TimedSchedule, Fraction]:
    """Search small problems exactly; return the best timeline and the lower bound of all problems."""
    nodes, open_bounds, known = EXACT_NODES, [], _score(best, measure)[0]
    bounds = {problem.layout: problem.measure(lower_bound(problem)) for problem in problems}
    for problem in sorted(problems, key=lambda problem: bounds[problem.layout]):
        bound = bounds[problem.layout]
        if bound >= known:
            continue
        if problem.size > EXACT_SIZE or nodes <= 0:
            open_bounds.append(bound)
            continue
        found = exact_search(problem, problem.length(known), nodes)
        nodes -= found.nodes
        if found.orders is not None:
            best = simulated(_schedule(problem, found.orders), costs)
            known = _score(best, measure)[0]
        if not found.proven:
            open_bounds.append(bound)
    return best, min([*open_bounds, known])


def fuse_backward(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with `I`, `W` pairs replaced by full backwards `B` where that delays nothing.

    A `B` sends its gradient at its end, so the action that needs it must not start before it arrives.
    """
    timeline = simulated(schedule, costs)
    starts = {cell.action: cell.start for row in timeline.cells for cell in row}
    rows: list[tuple[Action, ...]] = []
    for row in timeline.cells:
        actions: list[Action] = []
        for cell in row:
            before = actions[-1] if actions else None
            joined = _joined(before, cell, timeline, starts)
            if joined is not None:
                actions[-1] = joined
            else:
                actions.append(cell.action)
        rows.append(tuple(actions))
    return replace(schedule, actions=tuple(rows))


def _joined(
    before: Action | None, cell: Cell, timeline: TimedSchedule, starts: Mapping[Action, int]
) -> Action | None:
    """Return the `B` that replaces `before` (an `I`) and `cell` (its `W`); None if others would wait."""
    stage, kind, microbatch = cell.action
    if kind is not Kind.W or before != (stage, Kind.I, microbatch):
        return None
    schedule = timeline.schedule
    consumer = cell.action._replace(kind=Kind.I).consumer(schedule.stages)
    if consumer is not None:
        hop = timeline.hop if schedule.rank_of[consumer.stage] != schedule.rank_of[stage] else 0
        if starts[consumer] < cell.end + hop:
            return None
    return Action(stage, Kind.B, microbatch)
