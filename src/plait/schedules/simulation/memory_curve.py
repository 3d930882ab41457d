"""Memory of every rank over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from plait.schedules.action import Kind
from plait.schedules.memory import MemoryCosts, memory_use
from plait.schedules.simulation.timeline import Cell, Timeline


class MemoryPoint(NamedTuple):
    """Memory from `tick` on, until the next point, in units of `timeline.memory_costs`."""

    tick: int
    held: int


def memory_curve(timeline: Timeline) -> tuple[tuple[MemoryPoint, ...], ...]:
    """Return for each rank the points at which its memory changes, in order; before the first it is 0.

    A forward counts from its start. A full backward counts from start to end with its peak. Two points have
    the same tick where memory is held for no time at all: first the peak, then what stays. So the highest
    point of a rank is exactly its `timeline.peak`.
    """
    return tuple(tuple(_points(row, timeline.memory_costs)) for row in timeline.cells)


def _points(row: Sequence[Cell], costs: MemoryCosts) -> Iterator[MemoryPoint]:
    level = 0
    for tick, amounts in groupby(_amounts(row, costs), key=itemgetter(0)):
        units = [amount for _, amount in amounts]
        if max(units) > level:
            level = max(units)
            yield MemoryPoint(tick, level)
        if units[-1] != level:
            level = units[-1]
            yield MemoryPoint(tick, level)


def _amounts(row: Sequence[Cell], costs: MemoryCosts) -> Iterator[tuple[int, int]]:
    use = memory_use([cell.action for cell in row], costs)
    for (action, start, end), (most, after) in zip(row, use, strict=True):
        if action.kind in (Kind.F, Kind.B):
            yield start, most
        yield end, after
