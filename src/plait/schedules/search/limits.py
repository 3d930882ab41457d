"""Limits of a search: a lower bound on the length of its schedules, and the memory that ranks may hold.

A forward is admitted only if, after it, the oldest micro-batch with forwards left on the rank could still be
finished while all younger ones are held: a younger one frees no memory before that (the banker's algorithm,
Dijkstra 1965, with micro-batches as customers that are served in order).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from plait.schedules.action import SPLIT_KINDS, Kind
from plait.schedules.search.problem import Problem


def lower_bound(problem: Problem) -> int:
    """Return a lower bound, in ticks, on the length of any schedule of the problem: the best of three bounds.

    - the work of a rank and its idle time: before its first input gradient it can run no more forwards than
      the memory limit allows, and after its last one no more weight gradients, so that it idles while the
      pipeline fills and drains for longer than these take;
    - the memory × time of all micro-batches on a rank, each from forward to weight gradient without a pause,
      over the memory limit;
    - the path of one micro-batch through all stages, forward and back.
    """
    times, limit = problem.ticks.durations, problem.limit
    forwards, inputs, weights = (times[kind] for kind in SPLIT_KINDS)
    turned = _input_starts(problem)
    drain = _drains(problem)
    until_input, until_weight = problem.memory_costs.until_input, problem.memory_costs.until_weight
    bound = turned[0] + inputs[0] + weights[0]
    latest = max(problem.head_starts)
    for stages, head in zip(problem.stages_of, problem.head_starts, strict=True):
        work = problem.microbatches * sum(times[Kind.F][stage] + times[Kind.B][stage] for stage in stages)
        start = min(problem.first_starts[stage] for stage in stages)
        before = _most_time(stages, forwards, until_input, problem)
        after = _most_time(stages, weights, until_weight, problem)
        idle = max(start, ceil(min(turned[stage] for stage in stages) - before))
        idle += max(ceil(min(drain[stage] for stage in stages) - after), 0)
        life = sum(
            until_input[stage] * (turned[stage] + inputs[stage] - problem.first_starts[stage])
            + until_weight[stage] * weights[stage]
            for stage in stages
        )
        memory_bound = start + (ceil(Fraction(problem.microbatches * life, limit)) if limit else 0)
        bound = max(bound, work + idle + latest - head, memory_bound + latest - head)
    return bound


def _input_starts(problem: Problem) -> list[int]:
    """Return for each stage the earliest possible start of its first input gradient, in ticks."""
    durations = problem.ticks.durations
    start = problem.first_starts[-1] + durations[Kind.F][-1]
    starts = [start]
    for stage in range(problem.stages - 1, 0, -1):
        start += durations[Kind.I][stage] + problem.hops[stage - 1]
        starts.append(start)
    return starts[::-1]


def _drains(problem: Problem) -> list[int]:
    """Return for each stage the least time from the end of its last input gradient to the end of the step."""
    durations = problem.ticks.durations
    drains = [0]
    for stage in range(1, problem.stages):
        rest = max(drains[-1], durations[Kind.W][stage - 1])
        drains.append(problem.hops[stage - 1] + durations[Kind.I][stage - 1] + rest)
    return drains


def _most_time(
    stages: Sequence[int], times: Sequence[int], memory: Sequence[int], problem: Problem
) -> Fraction:
    """Return the maximum total time of operations on these `stages` that fit together into the memory limit.

    Parts of operations count where their sizes differ, so that the bound holds.
    """
    sizes = {memory[stage] for stage in stages}
    left = Fraction(problem.limit // max(min(sizes), 1) * min(sizes) if len(sizes) == 1 else problem.limit)
    most = Fraction(0)
    for stage in sorted(stages, key=lambda stage: Fraction(times[stage], memory[stage] or 1), reverse=True):
        count = Fraction(problem.microbatches)
        if memory[stage]:
            count = min(count, left / memory[stage])
            left -= count * memory[stage]
        most += count * times[stage]
    return most


class MemoryGuard:
    """Decides which operations a rank may run within its memory limit and without causing a deadlock."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.done = [0] * (3 * problem.stages)
        self.held = [0] * problem.ranks
        self.inside = [0] * problem.ranks
        """Memory of micro-batches whose input gradient is not done."""
        self._alone = [_microbatch_peaks(problem, rank) for rank in range(problem.ranks)]

    def fits(self, operation: int) -> bool:
        """Return whether `operation`, the next of its stage and kind, fits into its rank's free memory."""
        tables = self.problem.tables
        return self.held[tables.rank[operation]] + tables.memory_change[operation] <= self.problem.limit

    def admits(self, operation: int) -> bool:
        """Return whether `operation` fits into memory now and leaves room for all others later."""
        tables = self.problem.tables
        lane = tables.lane[operation]
        return self.fits(operation) and (lane % 3 > 0 or self._is_safe(tables.rank[operation], lane))

    def _is_safe(self, rank: int, lane: int) -> bool:
        """Return whether all micro-batches can finish one by one after a forward on the stage `lane // 3`."""
        alone, stages = self._alone[rank], self.problem.stages_of[rank]
        limit, until_input = self.problem.limit, self.problem.memory_costs.until_input
        if self.inside[rank] + until_input[lane // 3] + alone[0] <= limit:
            return True
        begun = [self.done[3 * stage] + (3 * stage == lane) for stage in stages]
        turned = [self.done[3 * stage + 1] for stage in stages]

        def younger(than: int) -> int:
            return sum(
                max(first - max(second, than + 1), 0) * until_input[stage]
                for first, second, stage in zip(begun, turned, stages, strict=True)
            )

        return all(
            younger(number) + alone[sum(count > number for count in turned)] <= limit
            for number in range(min(turned), max(turned) + 1)
        )

    def take(self, operation: int) -> None:
        """Mark `operation`, the next of its stage and kind, as finished, and count its memory."""
        self._change(operation, 1)

    def undo(self, operation: int) -> None:
        """Undo `take` of `operation`, the last finished one of its stage and kind."""
        self._change(operation, -1)

    def _change(self, operation: int, by: int) -> None:
        tables = self.problem.tables
        rank, lane = tables.rank[operation], tables.lane[operation]
        self.done[lane] += by
        self.held[rank] += by * tables.memory_change[operation]
        if lane % 3 < 2:
            self.inside[rank] += by * (1 - 2 * (lane % 3)) * self.problem.memory_costs.until_input[lane // 3]


def least_memory(problem: Problem, rank: int) -> int:
    """Return the peak activation memory of a rank that runs one micro-batch at a time: the least possible."""
    return _microbatch_peaks(problem, rank)[0]


def _microbatch_peaks(problem: Problem, rank: int) -> list[int]:
    """Return a micro-batch's peak memory on `rank` after it has run 0, 1, … of its input gradients there."""
    until_input, until_weight = problem.memory_costs.until_input, problem.memory_costs.until_weight
    inside, most = 0, [0]
    for stage in problem.stages_of[rank]:
        inside += until_input[stage]
        turning = inside + until_weight[stage] - until_input[stage]
        most.append(max(most[-1], inside, turning))
    return most[::-1]
