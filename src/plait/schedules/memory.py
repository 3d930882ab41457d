"""Activation memory of a rank: a micro-batch counts from its forward to its weight gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import inf
from numbers import Real
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

UNLIMITED = 1 << 4096
"""More units than any schedule needs."""
TOLERANCE = Fraction(1, 10**9)
"""Relative amount by which a limit may be exceeded: the rounding of floats, no more."""


class MemoryCosts(NamedTuple):
    """Activation memory of one micro-batch on each stage, in integer multiples of `unit`.

    1 is the memory of a micro-batch on all stages of a rank.
    """

    unit: Fraction
    until_input: tuple[int, ...]
    """From the start of the forward to the end of the input gradient."""
    until_weight: tuple[int, ...]
    """From the end of the input gradient to the end of the weight gradient."""


def even_memory_costs(schedule: Schedule) -> MemoryCosts:
    """Return the default memory costs: a micro-batch takes the same activation memory on every stage."""
    ones = (1,) * schedule.stages
    return MemoryCosts(Fraction(schedule.ranks, schedule.stages), ones, ones)


def memory_use(actions: Sequence[Action], costs: MemoryCosts) -> Iterator[tuple[int, int]]:
    """Yield for each action of a rank the peak memory during it and the memory after it, in `costs.unit`."""
    use = 0
    for stage, kind, _ in actions:
        if kind is Kind.F:
            use += costs.until_input[stage]
            yield use, use
            continue
        before = use
        if kind is not Kind.W:
            use += costs.until_weight[stage] - costs.until_input[stage]
        most = max(before, use)
        if kind is not Kind.I:
            use -= costs.until_weight[stage]
        yield most, use


def peak_memory(schedule: Schedule, costs: MemoryCosts | None = None) -> tuple[Fraction, ...]:
    """Return each rank's peak activation memory; 1 is that of a micro-batch on all stages of one rank."""
    costs = costs or even_memory_costs(schedule)
    return tuple(
        costs.unit * max((most for most, _ in memory_use(actions, costs)), default=0)
        for actions in schedule.actions
    )


def is_within(schedule: Schedule, limit: float, costs: MemoryCosts) -> bool:
    """Return whether each rank's peak activation memory is at most `limit`, see `plait.schedule`."""
    return max(peak_memory(schedule, costs)) <= limit_in_units(limit, costs.unit) * costs.unit


def limit_in_units(limit: float, unit: Fraction) -> int:
    """Return the memory `limit` in whole multiples of `unit`. Raises ScheduleError if negative or NaN."""
    number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not number or limit != limit or limit < 0:
        raise ScheduleError(f"limit is {limit}: give the most that a rank may hold, in micro-batches.")
    return UNLIMITED if limit == inf else int(Fraction(str(limit)) * (1 + TOLERANCE) / unit)
