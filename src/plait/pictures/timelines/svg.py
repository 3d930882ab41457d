"""A timeline as one self-contained SVG with a transparent background, legible on light and dark pages.

It has a row for each rank, with time on the horizontal axis: a cell for each action, or, where actions are
too narrow to be seen, a band with the share of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from plait.pictures.colours import LEGEND_SHADE, shade
from plait.pictures.quantities import round_numbers, with_unit
from plait.pictures.svg_elements import element, path, rect, svg_document, text_at
from plait.pictures.timelines.text import KIND_NAMES, kinds_of, title
from plait.schedules.action import Action, Kind
from plait.schedules.timed_schedule import Cell, TimedSchedule

CROWDED = 3
"""Pixels: where the average action is narrower, bands are drawn instead of actions."""
MARGIN = 12
RowLabel: TypeAlias = tuple[str, int]
"""Label of a row, and the rank of the schedule that it shows."""
_TITLE_LETTER, _TEXT_LETTER, _CELL_LETTER, _SMALL_LETTER = 8.6, 6.6, 7.0, 5.7
"""Pixels of a letter in the title and in text, rounded up; of a digit or capital in either font of cells."""
_AROUND = 2.2
"""Pixels around the text of a cell."""
_LINE, _BELOW = 20, 34
_RANK, _STAGE = 58, 22
"""Pixels for the labels of ranks, at least, and of stages."""
_ROW, _GAP = 34, 6
_LANE, _BETWEEN = 15, 1
"""On a rank with several stages: the height of a stage's lane, and the space below it."""
_LOW = 20
"""Cells lower than this have the small font."""
_COLUMN = 4.0
"""Least width of a column of a band, in pixels."""
_ACTIONS = 8
"""Least number of actions that a column averages over; with fewer, columns would alternate between kinds."""
_HEIGHT, _LOWEST, _HIGHEST = 640, 4, 34
"""Height of all bands together; of one."""
_APART = 13
"""Least distance between labels of bands."""
_STEPS = 40
"""Heights in a band are multiples of this part of it, so that similar columns become one."""


def draw_svg(
    timeline: TimedSchedule,
    *,
    width: int = 800,
    name: str | None = None,
    rows: Sequence[RowLabel] | None = None,
) -> str:
    """Return `timeline` as an SVG document of `width` pixels: a row per rank, a colour per kind of action.

    A rank with several stages has a numbered lane for each. Later micro-batches are lighter. A tooltip shows
    the action and times of a cell. Where actions would be too narrow to be seen, each row is a band of the
    share of each kind instead. `name` is the title, by default the schedule's. `rows`: label and rank of each
    row, by default one row per rank; for example one for each rank of a mesh.
    """
    name = name or title(timeline.schedule)
    labels = rows or [(f"rank {rank}", rank) for rank in range(timeline.schedule.ranks)]
    frame = Frame(timeline, width, labels)
    crowded = frame.average < CROWDED
    heading = _heading(frame, name, crowded=crowded)
    top = heading.height
    body = _bands(frame, top) if crowded else Cells(frame, top).rows()
    height = round(top + body.height + _BELOW)
    axis = _axis(frame, top, top + body.height)
    return svg_document(name, width, height, [*heading.elements, *axis, *body.elements])


def _heading(frame: Frame, name: str, *, crowded: bool) -> SvgPart:
    timeline, room = frame.timeline, frame.width - 2 * MARGIN
    peaks = " ".join(f"{units:g}" for units in timeline.peak)
    if len(timeline.peak) > 16:
        peaks = f"up to {max(timeline.peak):g}"
    figures = (
        f"makespan {with_unit(timeline.makespan, timeline.unit)} · bubble {timeline.bubble:.1%} · "
        f"peak activations per rank: {peaks}"
    )
    elements, y = [], 5.0
    for text, letter, style in ((name, _TITLE_LETTER, "title"), (figures, _TEXT_LETTER, "")):
        for line in wrap(text, max(int(room / letter), 8)):
            y += _LINE
            elements.append(text_at(MARGIN, y, line, class_=style))
    legend = _legend(frame, y + _LINE + 4, crowded=crowded)
    y += legend.height + 14
    if frame.chunks > 1 and not crowded:
        y += 8
        elements.append(text_at(frame.left - 5, y - 5, "stage", class_="stage"))
    return SvgPart(elements + legend.elements, y)


def _legend(frame: Frame, y: float, *, crowded: bool) -> SvgPart:
    """Return the legend, with the kinds of action that occur, in lines from `y` down."""
    elements: list[str] = []
    first, x = y, float(MARGIN)
    notes = ["height: share of the time; empty: idle"] if crowded else []
    if frame.timeline.schedule.microbatches > 1 and not crowded:
        notes = ["later micro-batches are lighter"]
    named = [(kind, KIND_NAMES[kind]) for kind in frame.kinds]
    for kind, text in [*named, *((None, note) for note in notes)]:
        wide = _TEXT_LETTER * len(text) + (25 if kind else 0)
        if x > MARGIN and x + wide > frame.width - MARGIN:
            x, y = MARGIN, y + _LINE
        if kind:
            elements.append(rect(x, y - 12, 19, 16, rx=4, fill=shade(kind, LEGEND_SHADE)))
            elements.append(text_at(x + 9.5, y, kind, class_="cell"))
        elements.append(text_at(x + (25 if kind else 0), y, text))
        x += wide + 18
    return SvgPart(elements, y - first + _LINE + 4)


def _axis(frame: Frame, top: float, bottom: float) -> Iterator[str]:
    """Yield grid lines at round times, with times below them and the unit in front."""
    timeline = frame.timeline
    yield text_at(MARGIN, bottom + 22, timeline.unit or "time")
    for time in round_numbers(0, timeline.makespan, max(2, min(12, int(frame.plot / 45)))):
        x = frame.left + time / (timeline.makespan or 1) * frame.plot
        yield path(f"M{x:.1f} {top - 4:g}V{bottom + 8:g}", class_="grid")
        yield text_at(x, bottom + 22, f"{time:g}", class_="time")


class SvgPart(NamedTuple):
    """Part of a picture: SVG elements, and their height in pixels."""

    elements: list[str]
    height: float


@dataclass(frozen=True)
class Frame:
    """Horizontal layout of a timeline's picture: labels on the left, then the plot of the whole step."""

    timeline: TimedSchedule
    width: int
    labels: Sequence[RowLabel]

    @cached_property
    def chunks(self) -> int:
        """Largest number of stages on one rank."""
        return max(len(self.timeline.schedule.stages_of(rank)) for _, rank in self.labels)

    @cached_property
    def left(self) -> float:
        """The x coordinate at which the plot begins."""
        longest = max(len(label) for label, _ in self.labels) * _TEXT_LETTER + 12
        return MARGIN + max(_RANK, longest) + (_STAGE if self.chunks > 1 else 0)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of action that occur."""
        return kinds_of(self.timeline)

    @property
    def plot(self) -> float:
        """Width in pixels of the plot: of the time from the first start to the last end."""
        return max(self.width - MARGIN - self.left, 1)

    def wide(self, ticks: float) -> float:
        """Return the width in pixels of a duration in ticks."""
        return ticks / max(self.timeline.length, 1) * self.plot

    def at(self, tick: float) -> float:
        """Return the x coordinate, in pixels, of a time in ticks (units of time)."""
        return self.left + self.wide(tick)

    @cached_property
    def average(self) -> float:
        """Average width of an action in pixels, on the rank where that is smallest."""
        rows = [row for row in self.timeline.cells if row and self.timeline.length]
        return min((self.wide(row[-1].end - row[0].start) / len(row) for row in rows), default=self.plot)


class Cells:
    """Draws the rows of a timeline from y = `top` down: a lane per stage, a rectangle per action."""

    def __init__(self, frame: Frame, top: float) -> None:
        self.frame, self.timeline, self.top = frame, frame.timeline, top
        self.chunks = frame.chunks
        self.lane = max(_LANE, (_ROW - _BETWEEN) // 2) if self.chunks > 1 else _ROW
        self.row_height = self.chunks * (self.lane + _BETWEEN) - _BETWEEN

    def rows(self) -> SvgPart:
        """Return the SVG elements of all rows."""
        count = len(self.frame.labels)
        elements = [element for number in range(count) for element in self.row(number)]
        return SvgPart(elements, count * (self.row_height + _GAP) - _GAP)

    def row(self, number: int) -> Iterator[str]:
        """Yield the SVG elements of a row: label, background, a lane for each stage, and the cells."""
        name, rank = self.frame.labels[number]
        y = self.top + number * (self.row_height + _GAP)
        frame, lanes = self.frame, {}
        yield text_at(MARGIN, y + self.row_height / 2 + 4, name)
        yield rect(frame.left, y, frame.plot, self.row_height, class_="track", rx=5)
        for index, stage in enumerate(self.timeline.schedule.stages_of(rank)):
            lanes[stage] = y + index * (self.lane + _BETWEEN)
            if self.chunks > 1:
                yield text_at(frame.left - 5, lanes[stage] + self.lane / 2 + 3, str(stage), class_="stage")
        if self.chunks > 1:
            for start, end in _busy(self.timeline.cells[rank]):
                yield rect(frame.at(start), y, frame.wide(end - start), self.row_height, class_="track")
        for action, start, end in self.timeline.cells[rank]:
            yield from self.cell(action, start, end, lanes[action.stage])

    def cell(self, action: Action, start: int, end: int, y: float) -> Iterator[str]:
        """Yield the rectangle of an action, and its text if there is room."""
        wide = self.frame.wide(end - start)
        gap = min(1.5, wide / 8)
        x, wide = self.frame.at(start) + gap / 2, wide - gap
        last = max(self.timeline.schedule.microbatches - 1, 1)
        times = f"{self.timeline.time(start):g} to {with_unit(self.timeline.time(end), self.timeline.unit)}"
        fill, round_by = shade(action.kind, action.microbatch / last), min(4.5, wide / 4)
        yield rect(x, y, wide, self.lane, f"{action}: {times}", rx=round_by, fill=fill)
        if text := self.written[action.kind](action):
            font, lift = ("cell small", 3) if self.lane < _LOW else ("cell", 4)
            yield text_at(x + wide / 2, y + self.lane / 2 + lift, text, class_=font)

    @cached_property
    def written(self) -> Mapping[Kind, Callable[[Action], str]]:
        """For each kind of action a function that returns the longest text that fits into its cells."""
        return {kind: self._fitting(kind) for kind in self.frame.kinds}

    def _fitting(self, kind: Kind) -> Callable[[Action], str]:
        cells = [cell for row in self.timeline.cells for cell in row if cell.action.kind is kind]
        letter = _SMALL_LETTER if self.lane < _LOW else _CELL_LETTER
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
    """Yield the start and end of each stretch of a rank's `row` without idle time."""
    for position, (_, start, end) in enumerate(row):
        if position == 0:
            first, last = start, end
        elif start > last:
            yield first, last
            first = start
        last = end
    if row:
        yield first, last


def _bands(frame: Frame, top: float) -> SvgPart:
    """Return a band for each row: the share of each kind of action in slices of time; the rest is idle."""
    pitch = max(_LOWEST, min(_HIGHEST, _HEIGHT // len(frame.labels)))
    height = pitch - (1 if pitch < 12 else 3)
    every = -(-_APART // pitch)
    elements = []
    for number, (name, rank) in enumerate(frame.labels):
        y = top + number * pitch
        if number % every == 0:
            elements.append(text_at(MARGIN, y + height / 2 + 4, name))
        elements.append(_band(frame, name, rank, y, height))
    return SvgPart(elements, len(frame.labels) * pitch - (pitch - height))


def _band(frame: Frame, name: str, rank: int, y: float, height: float) -> str:
    """Return a rank's band: background, and a stacked area for each kind of action, from the bottom up."""
    timeline, row = frame.timeline, frame.timeline.cells[rank]
    idle = with_unit(timeline.idle[rank], timeline.unit)
    about = f"{name}: {len(row):,} actions, idle {idle}, holds up to {timeline.peak[rank]:g}"
    inside = rect(frame.left, y, frame.plot, height, class_="track")
    columns = max(1, round(frame.plot / max(_COLUMN, _ACTIONS * frame.average)))
    shares = _shares(row, columns, max(timeline.length, 1) / columns)
    floor = [0.0] * columns
    for kind in frame.kinds:
        levels = [below + part for below, part in zip(floor, shares[kind], strict=True)]
        if area := _area(floor, levels, frame, y, height):
            inside += path(area, fill=shade(kind, LEGEND_SHADE))
        floor = levels
    return element("g", inside, about)


def _shares(row: Sequence[Cell], columns: int, column: float) -> Mapping[Kind, list[float]]:
    """Return the share of each kind of action in each of `columns` slices of `column` ticks."""
    shares = {kind: [0.0] * columns for kind in Kind}
    for action, start, end in row:
        here, until = start / column, end / column
        while here < until and int(here) < columns:
            after = min(int(here) + 1, until)
            shares[action.kind][int(here)] += after - here
            here = after
    return shares


def _area(floor: Sequence[float], levels: Sequence[float], frame: Frame, y: float, height: float) -> str:
    """Return the area between two step curves as an SVG path; equal neighbour columns are one rectangle."""
    wide = frame.plot / len(levels)
    steps = [
        (round(low * _STEPS) / _STEPS, round(high * _STEPS) / _STEPS)
        for low, high in zip(floor, levels, strict=True)
    ]
    path, column = "", 0
    for (low, high), same in groupby(steps):
        count = len(list(same))
        if high > low:
            x, base = frame.left + column * wide, y + height * (1 - low)
            path += f"M{x:.1f} {base:.1f}v{-height * (high - low):.1f}h{count * wide:.1f}V{base:.1f}z"
        column += count
    return path
