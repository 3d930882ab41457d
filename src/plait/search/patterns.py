"""Named patterns, settled: in the time that costs take, within their own memory."""

from __future__ import annotations

from dataclasses import replace

from plait.schedules.holding import allowed
from plait.schedules.policies import InPattern
from plait.schedules.schedule import Schedule
from plait.search.problem import Problem
from plait.search.race import HABITS
from plait.search.settle import justify, settle
from plait.simulation.costs import Costs
from plait.simulation.timeline import simulate

ROUNDS = 6
"""Of justification, for the best of the first round."""


def settled_pattern(pattern: Schedule, policy: InPattern, costs: Costs) -> Schedule:
    """The pattern settled for `costs` within the policy's memory, by the measure of its authors: the span.

    Settling may reorder what costs nothing into what costs more: then the pattern stays as it is.
    """
    ranks, chunks = pattern.ranks, policy.chunks
    evenly = Costs().holds(pattern)
    problem = Problem(
        policy.placement,
        ranks,
        chunks,
        pattern.microbatches,
        costs.ticks(pattern),
        evenly,
        allowed(policy.peak(ranks), evenly.unit),
        of_span=True,
    )
    orders = problem.orders_of(pattern.actions)
    tries = [(settle(problem.ahead, orders, problem.limit, habit), habit) for habit in HABITS]
    tries = [(justify(problem, settled, habit, 1), habit) for settled, habit in tries]
    settled, habit = min(tries, key=lambda pair: pair[0].length)
    rows = problem.actions_of(justify(problem, settled, habit, ROUNDS).orders)
    made = replace(pattern, actions=tuple(map(tuple, rows)))
    return min(made, pattern, key=lambda order: simulate(order, costs).span)
