"""The rows of a picture with a cell for each action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape

from plait.schedules.action import Action, Kind
from plait.schedules.simulation.colours import shade
from plait.schedules.simulation.svg_frame import MARGIN, Block, Frame
from plait.schedules.simulation.text import amount, kinds_of
from plait.schedules.simulation.timeline import Cell

_ROW, _GAP = 34, 6
_LANE, _BETWEEN = 15, 1
"""Of a rank with several stages: the height of a stage's lane, and what is free below it."""
_LOW = 20
"""Cells lower than this are written in the small font."""
_LETTER, _SMALL_LETTER, _AROUND = 7.0, 5.7, 2.2
"""Pixels that a digit or capital takes in either font, and that it needs around it."""


def draw_cells(frame: Frame, top: float) -> Block:
    """A row for each label of `frame`, from `top` down: a lane per stage, a cell per action."""
    return _Cells(frame, top).block()


class _Cells:
    def __init__(self, frame: Frame, top: float) -> None:
        self.frame, self.timeline, self.top = frame, frame.timeline, top
        self.chunks = frame.chunks
        self.lane = max(_LANE, (_ROW - _BETWEEN) // 2) if self.chunks > 1 else _ROW
        self.row_height = self.chunks * (self.lane + _BETWEEN) - _BETWEEN

    def block(self) -> Block:
        rows = range(len(self.frame.labels))
        parts = [part for number in rows for part in self.row(number)]
        return Block(parts, len(rows) * (self.row_height + _GAP) - _GAP)

    def row(self, number: int) -> Iterator[str]:
        name, rank = self.frame.labels[number]
        y = self.top + number * (self.row_height + _GAP)
        frame, lanes = self.frame, {}
        yield f'<text x="{MARGIN}" y="{y + self.row_height / 2 + 4:g}">{escape(name)}</text>'
        yield (
            f'<rect class="track" x="{frame.left:g}" y="{y:g}" width="{frame.plot:g}" '
            f'height="{self.row_height}" rx="5"/>'
        )
        for place, stage in enumerate(self.timeline.schedule.stages_of(rank)):
            lanes[stage] = y + place * (self.lane + _BETWEEN)
            if self.chunks > 1:
                middle = lanes[stage] + self.lane / 2 + 3
                yield f'<text class="stage" x="{frame.left - 5:g}" y="{middle:g}">{stage}</text>'
        if self.chunks > 1:
            for start, end in _busy(self.timeline.cells[rank]):
                x, wide = frame.at(start), frame.wide(end - start)
                yield (
                    f'<rect class="track" x="{x:.2f}" y="{y:g}" width="{wide:.2f}" '
                    f'height="{self.row_height}"/>'
                )
        for action, start, end in self.timeline.cells[rank]:
            yield from self.cell(action, start, end, lanes[action.stage])

    def cell(self, action: Action, start: int, end: int, y: float) -> Iterator[str]:
        wide = self.frame.wide(end - start)
        gap = min(1.5, wide / 8)
        x, wide = self.frame.at(start) + gap / 2, wide - gap
        last = max(self.timeline.schedule.microbatches - 1, 1)
        times = f"{self.timeline.time(start):g} to {amount(self.timeline, self.timeline.time(end))}"
        fill, round_by = shade(action.kind, action.microbatch / last), min(4.5, wide / 4)
        yield (
            f'<rect x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{self.lane}" rx="{round_by:.2g}" '
            f'fill="{fill}"><title>{action}: {times}</title></rect>'
        )
        if text := self.written[action.kind](action):
            small, lift = (" small", 3) if self.lane < _LOW else ("", 4)
            middle = y + self.lane / 2 + lift
            yield f'<text class="cell{small}" x="{x + wide / 2:.2f}" y="{middle:g}">{text}</text>'

    @cached_property
    def written(self) -> Mapping[Kind, Callable[[Action], str]]:
        """What is written into the cells of each kind: the most that fits into all of them."""
        return {kind: self._fitting(kind) for kind in kinds_of(self.timeline)}

    def _fitting(self, kind: Kind) -> Callable[[Action], str]:
        cells = [cell for row in self.timeline.cells for cell in row if cell.action.kind is kind]
        letter = _SMALL_LETTER if self.lane < _LOW else _LETTER
        texts: list[Callable[[Action], str]] = [
            lambda action: f"{action.kind}{action.microbatch}",
            lambda action: str(action.microbatch),
        ]
        for text in texts:
            room = (self.frame.wide(end - start) - len(text(action)) * letter for action, start, end in cells)
            if all(left >= _AROUND for left in room):
                return text
        return lambda action: ""


def _busy(row: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """From when to when a rank does one thing after another."""
    first = last = None
    for _, start, end in row:
        if first is not None and last is not None and start > last:
            yield first, last
            first = None
        first = start if first is None else first
        last = end
    if first is not None and last is not None:
        yield first, last
