"""What a rank holds: activations of micro-batches, from their forward to their weight gradient."""

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
"""More units than anything holds."""
TOLERANCE = Fraction(1, 10**9)
"""By which part of it a limit may be missed: the rounding of floats, no more."""


class Holds(NamedTuple):
    """What one micro-batch holds on each stage, in whole multiples of `unit`; 1 is a rank's whole share."""

    unit: Fraction
    until_input: tuple[int, ...]
    """From the start of the forward to the end of the input gradient."""
    until_weight: tuple[int, ...]
    """From then to the end of the weight gradient."""


def evenly(schedule: Schedule) -> Holds:
    """A chunk holds its part of 1, from the forward to the weight gradient."""
    return Holds(Fraction(schedule.ranks, schedule.stages), (1,) * schedule.stages, (1,) * schedule.stages)


def held(actions: Sequence[Action], holds: Holds) -> Iterator[tuple[int, int]]:
    """For each action of a rank: the most that is held during it, and what is held after, in units."""
    alive = 0
    for stage, kind, _ in actions:
        if kind is Kind.F:
            alive += holds.until_input[stage]
            yield alive, alive
            continue
        grows = holds.until_weight[stage] - holds.until_input[stage]
        before = alive
        if kind is not Kind.W:
            alive += grows
        most = max(before, alive)
        if kind is not Kind.I:
            alive -= holds.until_weight[stage]
        yield most, alive


def peaks(schedule: Schedule, holds: Holds | None = None) -> tuple[Fraction, ...]:
    """The most that each rank holds at once, where 1 is its whole share of one micro-batch."""
    holds = holds or evenly(schedule)
    return tuple(
        holds.unit * max((most for most, _ in held(actions, holds)), default=0)
        for actions in schedule.actions
    )


def allowed(limit: float, unit: Fraction) -> int:
    """How many whole units are within `limit`. ScheduleError where it is negative or no number."""
    number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not number or limit != limit or limit < 0:
        raise ScheduleError(f"limit is {limit}: give the most that a rank may hold, in micro-batches.")
    return UNLIMITED if limit == inf else int(Fraction(str(limit)) * (1 + TOLERANCE) / unit)
