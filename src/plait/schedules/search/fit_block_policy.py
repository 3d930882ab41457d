"""Building-block policies, scheduled for given costs within the memory of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from plait.schedules.action import SPLIT_KINDS
from plait.schedules.costs import Costs
from plait.schedules.memory import limit_in_units
from plait.schedules.named_schedules import BlockPolicy
from plait.schedules.schedule import Schedule
from plait.schedules.search.limits import lower_bound
from plait.schedules.search.list_scheduling import DispatchRule, TimedOrders, justify, list_schedule
from plait.schedules.search.local_search import DISPATCH_RULES
from plait.schedules.search.problem import Problem
from plait.schedules.timed_schedule import simulated

ROUNDS = 6
"""Rounds of justification for the best of the first round."""


def fit_block_policy(schedule: Schedule, policy: BlockPolicy, costs: Costs) -> Schedule:
    """Return `schedule` reordered for `costs`: the shortest span found within the memory of its `policy`.

    Where rescheduling makes the span longer, return `schedule` itself.
    """
    ranks, chunks = schedule.ranks, policy.chunks
    memory_costs = Costs().memory(schedule.ranks, schedule.stages)
    problem = Problem(
        policy.placement,
        ranks,
        chunks,
        schedule.microbatches,
        costs.ticks(schedule.ranks, schedule.stages),
        memory_costs,
        limit_in_units(policy.peak(ranks), memory_costs.unit),
        of_span=True,
    )
    orders, bound = problem.orders_of(schedule.actions), lower_bound(problem)
    tries: list[tuple[TimedOrders, DispatchRule]] = []
    for rule in _different(DISPATCH_RULES, problem):
        timed = justify(problem, list_schedule(problem.tables, orders, problem.limit, rule), rule, 1)
        tries.append((timed, rule))
        if timed.length == bound:
            break
    timed, rule = min(tries, key=lambda pair: pair[0].length)
    if timed.length > bound:
        timed = justify(problem, timed, rule, ROUNDS)
    made = replace(schedule, actions=problem.actions_of(timed.orders))
    return min(made, schedule, key=lambda order: simulated(order, costs).span)


def _different(rules: Sequence[DispatchRule], problem: Problem) -> Iterator[DispatchRule]:
    """Yield the dispatch `rules` without those that give the same schedule of `problem` as an earlier one.

    All times are multiples of one unit. Where a rule fills a gap of one unit with the longest operation, it
    fills every gap, and rules that differ only in `gap` give the same schedule, as with the default costs.
    """
    durations = [time for kind in SPLIT_KINDS for time in problem.ticks.durations[kind]]
    unit, longest = gcd(*durations, *problem.hops), max(durations)
    seen = set()
    for rule in rules:
        kind = replace(rule, gap=0.0) if rule.gap * longest <= unit else rule
        if kind not in seen:
            seen.add(kind)
            yield rule
