"""The race: heats of many initial_orders on a short run, finals at full length, and the winners shaken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import nsmallest
from itertools import cycle, islice
from random import Random

from plait.schedules.search.bound import lower_bound
from plait.schedules.search.initial_orders import InitialOrder, initial_orders, orders_from
from plait.schedules.search.list_scheduling import Effort, Habit, Settled, justify, settle
from plait.schedules.search.problem import Problem

SEED = 0
LEAST, MOST = 10, 100
"""Runners of each problem, however little effort there is, or much."""
HABITS = (Habit(0.5), Habit(1.0), Habit(0.5, True), Habit(0.0), Habit(1.0, True), Habit(0.0, True))
"""The most promising first."""
FINALISTS, WINNERS = 6, 3
HEATS, FINALS = 0.35, 0.3
"""Parts of the effort; shaking takes what is left."""
PASSES = 40
"""How often a winner is shaken, or there are fewer winners."""
UNREST, NOISE = (0.0, 0.01, 0.03, 0.1), (0.0, 1.0, 2.0)
CHANGES, LITTLE_NOISE = (0, 1, 3, 10), (0.0, 0.1)
"""Of ranks that are shaken: much, or a little. Changes are operations out of turn."""
FOCUS = 0.6
"""How often, of 1, only the rank that ends last is shaken."""
WORSE, BACK = 1.0, 0.05
"""Shaking goes on from what is longer by up to so many operations; or goes back, so often, to the best."""


@dataclass(frozen=True)
class Runner:
    """A schedule in the race: what it started from, how its ranks fill gaps, and how far it got."""

    problem: Problem
    start: InitialOrder
    habit: Habit
    settled: Settled

    @property
    def length(self) -> Fraction:
        """In the unit of the costs, so that problems can be compared."""
        return self.problem.measure(self.settled.length)


def race(problems: Sequence[Problem], effort: float) -> list[Runner]:
    """The best schedules that were found, the shortest first; at least one. About `effort` is spent."""
    full = {problem.layout: problem for problem in problems}
    finals = Effort(FINALS * effort)
    runners = [
        _at_full_length(full[runner.problem.layout], runner, finals)
        for runner in _heats(problems, HEATS * effort)
    ]
    least = min(problem.measure(lower_bound(problem)) for problem in problems)
    for habit in cycle(HABITS):
        runners = nsmallest(max(WINNERS, len(runners) - 1), runners, key=_length)
        if finals.left <= 0 or runners[0].length == least:
            break
        runners = [_justified(runner, habit, 2, finals) for runner in runners]
    winners = nsmallest(WINNERS, runners, key=_length)
    rest = (1 - HEATS - FINALS) * effort
    count = max(min(int(rest / PASSES / 2 / winners[0].problem.size), len(winners)), 1)
    return sorted((_shaken(winner, rest / count) for winner in winners[:count]), key=_length)


def short_run(problem: Problem) -> Problem:
    """A few micro-batches only: what costs most, filling and draining the pipeline, is as in a long run.

    Two for each rank; or more, if there is room for more of them at once.
    """
    share = sum(problem.memory_costs.until_input) // problem.ranks or 1
    enough = problem.ranks + max(problem.ranks, problem.limit // share)
    return problem.shortened(min(problem.microbatches, enough))


def _length(runner: Runner) -> Fraction:
    return runner.length


def _heats(problems: Sequence[Problem], effort: float) -> list[Runner]:
    """Starts with two habits each, on a short run; the better half goes on, and the first of each layout."""
    shorts = [short_run(problem) for problem in problems]
    # With n runners there are n, n, n / 2, n / 4 … settled.
    each = min(max(int(effort / 3 / sum(short.size for short in shorts)), LEAST), MOST)
    runners = [runner for short in shorts for runner in islice(_starters(short), each)]
    places = len(runners)
    while places > FINALISTS:
        places = max(places // 2, FINALISTS)
        different = {(runner.problem.layout, *runner.settled.ends): runner for runner in runners}
        ranked = sorted(different.values(), key=_length)
        first_of = {runner.problem.layout: runner for runner in reversed(ranked)}
        others = [runner for runner in ranked[places:] if runner is first_of[runner.problem.layout]]
        runners = [_justified(runner, runner.habit, 1) for runner in ranked[:places] + others]
    return runners


def _starters(problem: Problem) -> Iterator[Runner]:
    for start in initial_orders(problem, Random(SEED)):
        orders = orders_from(problem, start)
        for habit in HABITS[:2]:
            yield Runner(problem, start, habit, settle(problem.ahead, orders, problem.limit, habit))


def _justified(runner: Runner, habit: Habit, rounds: int, effort: Effort | None = None) -> Runner:
    settled = justify(runner.problem, runner.settled, habit, rounds, effort)
    return replace(runner, settled=settled)


def _at_full_length(problem: Problem, runner: Runner, effort: Effort) -> Runner:
    if problem.microbatches == runner.problem.microbatches:
        return replace(runner, problem=problem)
    settled = settle(problem.ahead, orders_from(problem, runner.start), problem.limit, runner.habit)
    return _justified(replace(runner, problem=problem, settled=settled), runner.habit, 3, effort)


def _shaken(runner: Runner, effort: float) -> Runner:
    """A runner, justified over and over by restless ranks."""
    problem, chance, left = runner.problem, Random(SEED), Effort(effort)
    bound = lower_bound(problem)
    best = now = runner.settled
    worse = WORSE * sum(problem.ahead.duration) / problem.size
    while left.left > 0 and best.length > bound:
        left.spend(2 * problem.size)
        after = _again(runner, now, chance)
        if after.length <= now.length + worse * chance.random():
            now = after
        elif chance.random() < BACK:
            now = best
        if after.length < best.length:
            best = now = after
    return replace(runner, settled=best)


def _again(runner: Runner, now: Settled, chance: Random) -> Settled:
    """Settled from the back and from the front; other habits have all ranks, or the one that ends last."""
    problem, habit = runner.problem, runner.habit
    if chance.random() < FOCUS:
        late = settle(problem.mirrored, now.reversed(), problem.limit, habit)
        other = {_last_rank(problem, now): _any_habit(chance)}
        return settle(problem.ahead, late.reversed(), problem.limit, habit, chance, other)
    late = settle(problem.mirrored, now.reversed(), problem.limit, _restless(runner, chance), chance)
    return settle(problem.ahead, late.reversed(), problem.limit, _restless(runner, chance), chance)


def _last_rank(problem: Problem, settled: Settled) -> int:
    """The rank that ends last."""
    ends = [settled.ends[order[-1]] for order in settled.orders]
    late = list(map(int.__add__, ends, problem.ahead.closes))
    return late.index(max(late))


def _restless(runner: Runner, chance: Random) -> Habit:
    """Any habit; or the runner's own, and a few operations out of turn."""
    if chance.random() < 0.5:
        unrest = min(chance.choice(CHANGES) / runner.problem.size, 1.0)
        return replace(runner.habit, unrest=unrest, noise=chance.choice(LITTLE_NOISE))
    return _any_habit(chance)


def _any_habit(chance: Random) -> Habit:
    return Habit(chance.random(), chance.random() < 0.5, chance.choice(UNREST), chance.choice(NOISE))
