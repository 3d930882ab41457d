"""A lower bound on the length of the schedules that a search looks for."""

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
