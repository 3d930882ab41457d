"""The search as a whole: the shortest schedule that holds no more than it may."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from plait.errors import ScheduleError
from plait.schedules.memory import limit_in_units, peak_memory
from plait.schedules.policies import POLICIES, BlockPolicy, policies_for, policy_schedule
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search.block_policies import settled_pattern
from plait.schedules.search.bound import lower_bound
from plait.schedules.search.exact_search import search_all
from plait.schedules.search.fuse_backward import fused
from plait.schedules.search.local_search import race, short_run
from plait.schedules.search.memory_guard import least_memory
from plait.schedules.search.problem import Layout, Orders, Problem
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.timeline import Timeline, simulate

Measure = Literal["makespan", "span"]
MOST_CHUNKS = 4
"""Chunks that are tried unless told."""
EFFORT = 800_000
"""Operations settled in a search, at least: a second or two."""
PER_OPERATION, MOST_EFFORT = 150, 4_000_000
"""In larger pipelines: for each operation of the largest problem, up to some seconds."""
PER_START, PER_FINAL = 20, 12
"""In the largest: for each operation of all short runs, and of the largest problem."""
PATTERN_SIZE = 10_000
"""Named patterns are settled for problems of so many operations; the race starts from them in any case."""
EXACT_SIZE, EXACT_NODES = 160, 20_000
"""Problems of so many operations are searched exactly, through so many nodes in all."""


def find(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float,
    chunks: Sequence[int],
    measure: Measure,
    rank_of: Sequence[int] | None = None,
) -> Schedule:
    """The schedule with the least `measure` that was found among those in which no rank holds above `limit`.

    Its `policy` says where its stages live, or which named policy it is; its `bound` how short a schedule
    could be at best: as short as this one where nothing better exists. The same for the same arguments on
    every machine. `chunks`: how many stages a rank may have; `rank_of`: where they have to live, if that is
    not free. ScheduleError for a limit below what any schedule needs, and for places that are neither a loop
    nor a v.
    """
    layouts = list(_layouts(ranks, costs, chunks))
    if rank_of is not None:
        layouts = _in_place(layouts, ranks, rank_of)
    problems = _problems(ranks, microbatches, costs, limit, layouts, measure)
    found = [_schedule(runner.problem, runner.settled.orders) for runner in race(problems, _effort(problems))]
    found += _fitting_policies(problems, costs, limit)
    best = min(
        (simulate(schedule, costs) for schedule in found), key=lambda timeline: _score(timeline, measure)
    )
    best, bound = _searched_exactly(problems, best, costs, measure)
    return replace(fused(best.schedule, costs), bound=float(bound))


def _score(timeline: Timeline, measure: Measure) -> tuple[Fraction, Fraction, int]:
    """What is minimised first, then what else is worth having."""
    first, second = timeline.length, timeline.longest
    if measure == "span":
        first, second = second, first
    return first * timeline.tick, second * timeline.tick, timeline.schedule.stages


def _in_place(layouts: Sequence[Layout], ranks: int, rank_of: Sequence[int]) -> list[Layout]:
    fits = [layout for layout in layouts if layout[0].rank_of(ranks, layout[1]) == tuple(rank_of)]
    if not fits:
        raise ScheduleError(
            f"no order is searched for stages on the ranks {list(rank_of)}: let them go in a loop or a v."
        )
    return fits[:1]


def _problems(
    ranks: int, microbatches: int, costs: Costs, limit: float, layouts: Iterable[Layout], measure: Measure
) -> list[Problem]:
    """The pipeline with its stages laid out in each way in which it can be run within the limit."""
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
            f"a limit of {limit} is below what any schedule needs: "
            f"let each rank hold at least {float(least):g}."
        )
    return problems


def chunk_counts(ranks: int, layers: int | None = None) -> Sequence[int]:
    """How many chunks a rank are tried; where `layers` are to be cut, each stage gets one at least."""
    most = MOST_CHUNKS if layers is None else min(MOST_CHUNKS, layers // ranks)
    return range(1, max(most, 1) + 1)


def _layouts(ranks: int, costs: Costs, chunks: Sequence[int]) -> Iterator[Layout]:
    every = (costs.F, costs.I, costs.W, costs.until_I, costs.until_W)
    lengths = {len(cost) for cost in every if isinstance(cost, Sequence)}
    if len(chunks) > 1 and lengths:
        chunks = (max(min(lengths) // ranks, 1),)  # what does not fit is refused where costs are read
    for count in chunks:
        if count == 1:
            yield Placement.LINEAR, 1
        else:
            yield Placement.V, count
            yield Placement.LOOP, count


def _effort(problems: Sequence[Problem]) -> float:
    largest = max(problem.size for problem in problems)
    if len(problems) == 1:
        largest *= 2  # the heats are short then: more time to improve the winners
    starts = sum(short_run(problem).size for problem in problems)
    return max(EFFORT, min(PER_OPERATION * largest, MOST_EFFORT), PER_START * starts + PER_FINAL * largest)


def _schedule(problem: Problem, orders: Orders) -> Schedule:
    chunks = "" if problem.chunks == 1 else f", {problem.chunks} chunks"
    rows = tuple(map(tuple, problem.actions_of(orders)))
    return Schedule(f"auto ({problem.placement}{chunks})", problem.microbatches, problem.rank_of, rows)


def _fitting_policies(problems: Sequence[Problem], costs: Costs, limit: float) -> Iterator[Schedule]:
    """The named policies as they are, where they fit: what is found should never be behind one of them."""
    for problem in problems:
        for name in policies_for(problem.placement, problem.chunks):
            policy = POLICIES[name]
            if isinstance(policy, BlockPolicy) and problem.size > PATTERN_SIZE:
                continue
            made = policy_schedule(name, problem.ranks, problem.microbatches, problem.chunks)
            if isinstance(policy, BlockPolicy):
                made = settled_pattern(made, policy, costs)
            holds = costs.memory(made.ranks, made.stages)
            if max(peak_memory(made, holds)) <= limit_in_units(limit, holds.unit) * holds.unit:
                yield replace(made, policy=f"auto ({name})")


def _searched_exactly(
    problems: Sequence[Problem], best: Timeline, costs: Costs, measure: Measure
) -> tuple[Timeline, Fraction]:
    """Small problems searched to the end: the best schedule, and what no schedule can be below."""
    nodes, open_bounds, known = EXACT_NODES, [], _score(best, measure)[0]
    bounds = {problem.layout: problem.measure(lower_bound(problem)) for problem in problems}
    for problem in sorted(problems, key=lambda problem: bounds[problem.layout]):
        bound = bounds[problem.layout]
        if bound >= known:
            continue
        if problem.size > EXACT_SIZE or nodes <= 0:
            open_bounds.append(bound)
            continue
        found = search_all(problem, problem.length(known), nodes)
        nodes -= found.nodes
        if found.orders is not None:
            best = simulate(_schedule(problem, found.orders), costs)
            known = _score(best, measure)[0]
        if not found.proven:
            open_bounds.append(bound)
    return best, min([*open_bounds, known])
