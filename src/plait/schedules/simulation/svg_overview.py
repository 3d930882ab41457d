"""The rows of a picture of so many actions that none could be seen: what ranks spend their time on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby

from plait.schedules.action import Kind
from plait.schedules.simulation.colours import MIDDLE, shade
from plait.schedules.simulation.svg_frame import MARGIN, Block, Frame
from plait.schedules.simulation.text import amount, kinds_of
from plait.schedules.simulation.timeline import Cell

_COLUMN = 4.0
"""Pixels, at least, that are one column of a band."""
_ACTIONS = 8
"""As many actions, at least, a column averages over, or it would show now one kind and now the other."""
_HEIGHT, _LOWEST, _HIGHEST = 640, 4, 34
"""Of all rows together; of one."""
_LINE = 13
"""Labels stand at least so far apart."""
_STEPS = 40
"""Heights in a row are multiples of this part of it, so that columns that look alike are one."""


def draw_overview(frame: Frame, top: float) -> Block:
    """A row for each label of `frame`, from `top` down: in every column the parts of its time that go to each
    kind of action, from the bottom up. What is free above them is idle time.
    """
    return _Bands(frame, top).block()


@dataclass(frozen=True)
class _Bands:
    frame: Frame
    top: float

    @property
    def pitch(self) -> float:
        """From one row to the next."""
        return max(_LOWEST, min(_HIGHEST, _HEIGHT // len(self.frame.labels)))

    @property
    def row_height(self) -> float:
        """Of a row, without what is free below it."""
        return self.pitch - (1 if self.pitch < 12 else 3)

    @property
    def columns(self) -> int:
        """How many columns a row has."""
        wide = max(_COLUMN, _ACTIONS * self.frame.average)
        return max(1, round(self.frame.plot / wide))

    @cached_property
    def kinds(self) -> list[Kind]:
        """Those that occur, from the bottom up."""
        return kinds_of(self.frame.timeline)

    def block(self) -> Block:
        """All rows."""
        every = -(-_LINE // self.pitch)
        parts = []
        for number, (name, rank) in enumerate(self.frame.labels):
            y = self.top + number * self.pitch
            if number % every == 0:
                middle = y + self.row_height / 2 + 4
                parts.append(f'<text x="{MARGIN}" y="{middle:g}">{escape(name)}</text>')
            parts += self.band(name, rank, y)
        return Block(parts, len(self.frame.labels) * self.pitch - (self.pitch - self.row_height))

    def band(self, name: str, rank: int, y: float) -> Iterator[str]:
        """One row: its track, and an area for each kind that stands on that of the one before."""
        frame, timeline = self.frame, self.frame.timeline
        row = timeline.cells[rank]
        idle = amount(timeline, timeline.idle[rank])
        about = f"{name}: {len(row):,} actions, idle {idle}, holds up to {timeline.peak[rank]:g}"
        yield f"<g><title>{escape(about)}</title>"
        yield (
            f'<rect class="track" x="{frame.left:g}" y="{y:g}" width="{frame.plot:g}" '
            f'height="{self.row_height:g}"/>'
        )
        used = self.used(row)
        floor = [0.0] * self.columns
        for kind in self.kinds:
            levels = [below + part for below, part in zip(floor, used[kind], strict=True)]
            path = _area(floor, levels, frame, y, self.row_height)
            if path:
                yield f'<path fill="{shade(kind, MIDDLE)}" d="{path}"/>'
            floor = levels
        yield "</g>"

    def used(self, row: Sequence[Cell]) -> Mapping[Kind, list[float]]:
        """Of each column, the part that goes to each kind."""
        timeline, columns = self.frame.timeline, self.columns
        column = max(timeline.length, 1) / columns
        used = {kind: [0.0] * columns for kind in Kind}
        for action, start, end in row:
            here, until = (start - timeline.first) / column, (end - timeline.first) / column
            while here < until and int(here) < columns:
                after = min(int(here) + 1, until)
                used[action.kind][int(here)] += after - here
                here = after
        return used


def _area(floor: Sequence[float], levels: Sequence[float], frame: Frame, y: float, height: float) -> str:
    """Steps between two curves as an SVG path, with one rectangle for columns that look alike."""
    wide = frame.plot / len(levels)
    steps = [
        (round(low * _STEPS) / _STEPS, round(high * _STEPS) / _STEPS)
        for low, high in zip(floor, levels, strict=True)
    ]
    path, place = "", 0
    for (low, high), same in groupby(steps):
        count = len(list(same))
        if high > low:
            x, base = frame.left + place * wide, y + height * (1 - low)
            path += f"M{x:.1f} {base:.1f}v{-height * (high - low):.1f}h{count * wide:.1f}V{base:.1f}z"
        place += count
    return path
