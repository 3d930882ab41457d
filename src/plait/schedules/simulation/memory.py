"""How much every rank holds over time: when it changes, and how much is held from then on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from plait.schedules.action import Kind
from plait.schedules.holding import Holds, held
from plait.schedules.simulation.timeline import Cell, Timeline


class Point(NamedTuple):
    """What is held from `time` on, until the next point."""

    time: float
    """In the unit of the costs."""
    held: float
    """In units of one rank's micro-batch."""


class Step(NamedTuple):
    """A point in whole numbers: ticks of the timeline, and multiples of what it holds in (`holds.unit`)."""

    tick: int
    held: int


def memory_curve(timeline: Timeline) -> tuple[tuple[Point, ...], ...]:
    """Per rank: the points at which the amount that it holds changes, in order; before the first it is 0.

    A forward holds from its start. A full backward counts from start to end as the most that it holds within.
    Two points stand at the same time where something is held for no time at all: first the most, then what
    stays. So the highest point of a rank is exactly `timeline.peak` of it.
    """
    unit = timeline.holds.unit
    return tuple(
        tuple(Point(timeline.time(tick), float(units * unit)) for tick, units in steps)
        for steps in memory_steps(timeline)
    )


def memory_steps(timeline: Timeline) -> tuple[tuple[Step, ...], ...]:
    """As `memory_curve`, in whole numbers."""
    return tuple(tuple(_steps(row, timeline.holds)) for row in timeline.cells)


def _steps(row: Sequence[Cell], holds: Holds) -> Iterator[Step]:
    level = 0
    for tick, amounts in groupby(_amounts(row, holds), key=itemgetter(0)):
        units = [amount for _, amount in amounts]
        if max(units) > level:
            level = max(units)
            yield Step(tick, level)
        if units[-1] != level:
            level = units[-1]
            yield Step(tick, level)


def _amounts(row: Sequence[Cell], holds: Holds) -> Iterator[tuple[int, int]]:
    """After each start and end, how much is held then."""
    amounts = held([cell.action for cell in row], holds)
    for (action, start, end), (most, after) in zip(row, amounts, strict=True):
        if action.kind in (Kind.F, Kind.B):
            yield start, most
        yield end, after
