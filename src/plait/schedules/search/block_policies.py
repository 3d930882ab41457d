"""Named patterns, settled: in the time that costs take, within their own memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from plait.schedules.memory import limit_in_units
from plait.schedules.policies import BlockPolicy
from plait.schedules.schedule import Schedule
from plait.schedules.search.bound import lower_bound
from plait.schedules.search.list_scheduling import Habit, Settled, justify, settle
from plait.schedules.search.local_search import HABITS
from plait.schedules.search.problem import KINDS, Problem
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.timeline import simulate

ROUNDS = 6
"""Of justification, for the best of the first round."""


def settled_pattern(pattern: Schedule, policy: BlockPolicy, costs: Costs) -> Schedule:
    """The pattern settled for `costs` within the policy's memory, by the measure of its authors: the span.

    Settling may reorder what costs nothing into what costs more: then the pattern stays as it is.
    """
    ranks, chunks = pattern.ranks, policy.chunks
    evenly = Costs().memory(pattern.ranks, pattern.stages)
    problem = Problem(
        policy.placement,
        ranks,
        chunks,
        pattern.microbatches,
        costs.ticks(pattern.ranks, pattern.stages),
        evenly,
        limit_in_units(policy.peak(ranks), evenly.unit),
        of_span=True,
    )
    orders, bound = problem.orders_of(pattern.actions), lower_bound(problem)
    tries: list[tuple[Settled, Habit]] = []
    for habit in _different(HABITS, problem):
        settled = justify(problem, settle(problem.ahead, orders, problem.limit, habit), habit, 1)
        tries.append((settled, habit))
        if settled.length == bound:
            break
    settled, habit = min(tries, key=lambda pair: pair[0].length)
    if settled.length > bound:
        settled = justify(problem, settled, habit, ROUNDS)
    rows = problem.actions_of(settled.orders)
    made = replace(pattern, actions=tuple(map(tuple, rows)))
    return min(made, pattern, key=lambda order: simulate(order, costs).span)


def _different(habits: Sequence[Habit], problem: Problem) -> Iterator[Habit]:
    """Those of `habits` that can settle `problem` differently, the first of each kind.

    All times are multiples of one unit. Where the longest operation fills enough of a gap of one unit, every
    gap is filled, and habits that differ in `gap` alone do the same: so it is with the default costs.
    """
    durations = [time for kind in KINDS for time in problem.ticks.durations[kind]]
    unit, longest = gcd(*durations, *problem.hops), max(durations)
    seen = set()
    for habit in habits:
        kind = replace(habit, gap=0.0) if habit.gap * longest <= unit else habit
        if kind not in seen:
            seen.add(kind)
            yield habit
