"""Where things stand in an SVG of a timeline: time goes to the right, ranks go down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from plait.schedules.simulation.timeline import Timeline

MARGIN = 12
Label: TypeAlias = tuple[str, int]
"""What stands before a row, and the rank of the schedule that it shows."""
_RANK, _STAGE, _LETTER = 58, 22, 6.6


class Block(NamedTuple):
    """SVG elements and the height, in pixels, that they take."""

    parts: list[str]
    height: float


@dataclass(frozen=True)
class Frame:
    """The columns of a picture: labels on the left, then the plot, as wide as the makespan."""

    timeline: Timeline
    width: int
    labels: Sequence[Label]

    @cached_property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(len(self.timeline.schedule.stages_of(rank)) for _, rank in self.labels)

    @cached_property
    def left(self) -> float:
        """Where the plot begins."""
        longest = max(len(label) for label, _ in self.labels) * _LETTER + 12
        return MARGIN + max(_RANK, longest) + (_STAGE if self.chunks > 1 else 0)

    @property
    def plot(self) -> float:
        """How wide the makespan is."""
        return max(self.width - MARGIN - self.left, 1)

    def wide(self, ticks: float) -> float:
        """Pixels that so many ticks take."""
        return ticks / max(self.timeline.length, 1) * self.plot

    def at(self, tick: float) -> float:
        """The x coordinate of a tick."""
        return self.left + self.wide(tick - self.timeline.first)

    @property
    def average(self) -> float:
        """Pixels that an action takes on average, on the rank with the most of them."""
        rows = [row for row in self.timeline.cells if row and self.timeline.length]
        return min((self.wide(row[-1].end - row[0].start) / len(row) for row in rows), default=self.plot)
