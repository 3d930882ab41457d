"""Local search: screens initial orders on a short run, refines the best at full length, perturbs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import nsmallest
from itertools import cycle, islice
from math import gcd
from operator import attrgetter
from random import Random

from plait.schedules.action import SPLIT_KINDS
from plait.schedules.costs import Costs, limit_in_units
from plait.schedules.named_schedules import BlockPolicy
from plait.schedules.schedule import Schedule
from plait.schedules.search.initial_orders import InitialOrder, initial_orders, orders_from
from plait.schedules.search.list_scheduling import Budget, DispatchRule, TimedOrders, justify, list_schedule
from plait.schedules.search.lower_bound import lower_bound
from plait.schedules.search.problem import Problem
from plait.schedules.timed_schedule import simulated

SEED = 0
LEAST, MOST = 10, 100
"""Range of the number of candidates of each problem."""
DISPATCH_RULES = tuple(
    DispatchRule(*rule) for rule in ((0.5,), (1.0,), (0.5, True), (0.0,), (1.0, True), (0.0, True))
)
"""The most promising first."""
REFINED, PERTURBED = 6, 3
"""Number of candidates that are refined, and perturbed."""
SCREENING, REFINEMENT = 0.35, 0.3
"""Parts of the budget; perturbation has the rest."""
PASSES = 40
"""Least number of perturbations of a candidate, or fewer candidates are perturbed."""
SWAP_CHANCES, GAP_NOISES = (0.0, 0.01, 0.03, 0.1), (0.0, 1.0, 2.0)
"""Choices for a random rule."""
FEW_SWAPS, SMALL_GAP_NOISES = (0, 1, 3, 10), (0.0, 0.1)
"""Choices for a perturbed rule: expected number of operations out of order, and noise."""
FOCUS = 0.6
"""Probability that only the rank that ends last is perturbed."""
WORSE, BACK = 1.0, 0.05
"""How much longer the next orders may be, in operations; else the probability of a return to the best."""
ROUNDS = 6
"""Rounds of justification for the best of the first round."""
BY_LENGTH = attrgetter("length")


@dataclass(frozen=True)
class Candidate:
    """A schedule in the local search: its initial order, its rule to fill gaps, and its timed orders."""

    problem: Problem
    start: InitialOrder
    rule: DispatchRule
    timed: TimedOrders

    @property
    def length(self) -> Fraction:
        """Length of the schedule in the unit of the costs, which is comparable between problems."""
        return self.problem.measure(self.timed.length)


def local_search(problems: Sequence[Problem], budget: float) -> list[Candidate]:
    """Return the best schedules found, at least one, shortest first; `budget`: operations to schedule."""
    full = {problem.layout: problem for problem in problems}
    refinement = Budget(REFINEMENT * budget)
    candidates = [
        _at_full_length(full[candidate.problem.layout], candidate, refinement)
        for candidate in _screened(problems, SCREENING * budget)
    ]
    least = min(problem.measure(lower_bound(problem)) for problem in problems)
    for rule in cycle(DISPATCH_RULES):
        candidates = nsmallest(max(PERTURBED, len(candidates) - 1), candidates, key=BY_LENGTH)
        if refinement.left <= 0 or candidates[0].length == least:
            break
        candidates = [_justified(candidate, rule, 2, refinement) for candidate in candidates]
    chosen = nsmallest(PERTURBED, candidates, key=BY_LENGTH)
    rest = (1 - SCREENING - REFINEMENT) * budget
    count = max(min(int(rest / PASSES / 2 / chosen[0].problem.size), len(chosen)), 1)
    return sorted((_perturbed(candidate, rest / count) for candidate in chosen[:count]), key=BY_LENGTH)


def shortened_problem(problem: Problem) -> Problem:
    """Return the problem with fewer micro-batches, but the same start and end of the pipeline.

    Two for each rank; or more where the memory limit allows more of them at once.
    """
    share = sum(problem.memory_costs.until_input) // problem.ranks or 1
    enough = problem.ranks + max(problem.ranks, problem.limit // share)
    return replace(problem, microbatches=min(problem.microbatches, enough))


def _screened(problems: Sequence[Problem], budget: float) -> list[Candidate]:
    """Return the candidates that are best with few micro-batches, and the best of each stage layout."""
    shorts = [shortened_problem(problem) for problem in problems]
    # With n candidates n, n, n / 2, n / 4 … orders are scheduled.
    each = min(max(int(budget / 3 / sum(short.size for short in shorts)), LEAST), MOST)
    candidates = [candidate for short in shorts for candidate in islice(_initial_candidates(short), each)]
    count = len(candidates)
    while count > REFINED:
        count = max(count // 2, REFINED)
        different = {(candidate.problem.layout, *candidate.timed.ends): candidate for candidate in candidates}
        ranked = sorted(different.values(), key=BY_LENGTH)
        first_of = {candidate.problem.layout: candidate for candidate in reversed(ranked)}
        others = [
            candidate for candidate in ranked[count:] if candidate is first_of[candidate.problem.layout]
        ]
        candidates = [_justified(candidate, candidate.rule, 1) for candidate in ranked[:count] + others]
    return candidates


def _initial_candidates(problem: Problem) -> Iterator[Candidate]:
    for start in initial_orders(problem, Random(SEED)):
        orders = orders_from(problem, start)
        for rule in DISPATCH_RULES[:2]:
            yield Candidate(problem, start, rule, list_schedule(problem.tables, orders, problem.limit, rule))


def _justified(
    candidate: Candidate, rule: DispatchRule, rounds: int, budget: Budget | None = None
) -> Candidate:
    timed = justify(candidate.problem, candidate.timed, rule, rounds, budget)
    return replace(candidate, timed=timed)


def _at_full_length(problem: Problem, candidate: Candidate, budget: Budget) -> Candidate:
    if problem.microbatches == candidate.problem.microbatches:
        return replace(candidate, problem=problem)
    orders = orders_from(problem, candidate.start)
    timed = list_schedule(problem.tables, orders, problem.limit, candidate.rule)
    return _justified(replace(candidate, problem=problem, timed=timed), candidate.rule, 3, budget)


def _perturbed(candidate: Candidate, budget: float) -> Candidate:
    """Return `candidate` with the shortest orders found by randomly changed rescheduling within `budget`."""
    problem, rng, left = candidate.problem, Random(SEED), Budget(budget)
    bound = lower_bound(problem)
    best = now = candidate.timed
    worse = WORSE * sum(problem.tables.duration) / problem.size
    while left.left > 0 and best.length > bound:
        left.left -= 2 * problem.size
        after = _perturb_once(candidate, now, rng)
        if after.length <= now.length + worse * rng.random():
            now = after
        elif rng.random() < BACK:
            now = best
        if after.length < best.length:
            best = now = after
    return replace(candidate, timed=best)


def _perturb_once(candidate: Candidate, now: TimedOrders, rng: Random) -> TimedOrders:
    """Reschedule `now` backward, then forward, by random rules for all ranks or only the one ending last."""
    problem, rule = candidate.problem, candidate.rule
    tables, mirrored, limit = problem.tables, problem.mirrored_tables, problem.limit
    if rng.random() < FOCUS:
        late = list_schedule(mirrored, now.reversed(), limit, rule)
        other = {_last_rank(problem, now): _random_rule(rng)}
        return list_schedule(tables, late.reversed(), limit, rule, rng, other)
    late = list_schedule(mirrored, now.reversed(), limit, _perturbed_rule(candidate, rng), rng)
    return list_schedule(tables, late.reversed(), limit, _perturbed_rule(candidate, rng), rng)


def _last_rank(problem: Problem, timed: TimedOrders) -> int:
    ends = [timed.ends[order[-1]] for order in timed.orders]
    late = list(map(int.__add__, ends, problem.tables.end_offsets))
    return late.index(max(late))


def _perturbed_rule(candidate: Candidate, rng: Random) -> DispatchRule:
    """Return the candidate's dispatch rule with small random changes or, as often, a random rule."""
    if rng.random() < 0.5:
        swap_chance = min(rng.choice(FEW_SWAPS) / candidate.problem.size, 1.0)
        return replace(candidate.rule, swap_chance=swap_chance, gap_noise=rng.choice(SMALL_GAP_NOISES))
    return _random_rule(rng)


def _random_rule(rng: Random) -> DispatchRule:
    return DispatchRule(rng.random(), rng.random() < 0.5, rng.choice(SWAP_CHANCES), rng.choice(GAP_NOISES))


def fit_block_policy(schedule: Schedule, policy: BlockPolicy, costs: Costs) -> Schedule:
    """Return `schedule` reordered for `costs`, as short as found within the memory of its `policy`.

    Where rescheduling makes the span longer, return `schedule` itself.
    """
    ranks, count, stages = schedule.ranks, schedule.microbatches, schedule.stages
    ticks, holds = costs.ticks(ranks, stages), Costs().memory(ranks, stages)
    limit = limit_in_units(policy.peak(ranks), holds.unit)
    problem = Problem(policy.placement, ranks, policy.chunks, count, ticks, holds, limit, of_span=True)
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
