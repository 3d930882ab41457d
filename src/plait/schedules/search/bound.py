"""Lower bounds: what no schedule of a problem can be shorter than, whatever its order."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from plait.schedules.action import Kind
from plait.schedules.search.problem import Problem


def lower_bound(problem: Problem) -> int:
    """No schedule settles in fewer ticks. The largest of these bounds, over all ranks:

    - a rank's work; before its first input gradient it can do no more forwards than there is room for, and
      after its last one no more weight gradients, so that it is idle where the pipeline is filled and
      drained longer than that takes;
    - the room that all micro-batches need on a rank, each from forward to weight gradient without a pause,
      over the room that there is;
    - the way of one micro-batch through all stages, forth and back.
    """
    times, limit = problem.ticks.durations, problem.limit
    forwards, inputs, weights = (times[kind] for kind in (Kind.F, Kind.I, Kind.W))
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
        crowded = start + (ceil(Fraction(problem.microbatches * life, limit)) if limit else 0)
        bound = max(bound, work + idle + latest - head, crowded + latest - head)
    return bound


def _input_starts(problem: Problem) -> list[int]:
    """Per stage: the earliest start of its first input gradient."""
    durations = problem.ticks.durations
    start = problem.first_starts[-1] + durations[Kind.F][-1]
    starts = [start]
    for stage in range(problem.stages - 1, 0, -1):
        start += durations[Kind.I][stage] + problem.hops[stage - 1]
        starts.append(start)
    return starts[::-1]


def _drains(problem: Problem) -> list[int]:
    """Per stage: the least time from the end of its last input gradient to the end of all."""
    durations = problem.ticks.durations
    drains = [0]
    for stage in range(1, problem.stages):
        behind = max(drains[-1], durations[Kind.W][stage - 1])
        drains.append(problem.hops[stage - 1] + durations[Kind.I][stage - 1] + behind)
    return drains


def _most_time(
    stages: Sequence[int], times: Sequence[int], room: Sequence[int], problem: Problem
) -> Fraction:
    """The longest that a rank can work on operations that take `room`, within the limit.

    Parts of an operation count too where operations differ in size, to be on the safe side.
    """
    sizes = {room[stage] for stage in stages}
    left = Fraction(problem.limit // max(min(sizes), 1) * min(sizes) if len(sizes) == 1 else problem.limit)
    most = Fraction(0)
    for stage in sorted(stages, key=lambda stage: Fraction(times[stage], room[stage] or 1), reverse=True):
        count = Fraction(problem.microbatches)
        if room[stage]:
            count = min(count, left / room[stage])
            left -= count * room[stage]
        most += count * times[stage]
    return most
