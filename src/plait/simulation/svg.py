"""A timeline as one self-contained SVG without a background, legible on light pages and on dark ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from functools import cached_property
from html import escape

from plait.schedules.action import Action, Kind
from plait.simulation.text import NAMES, kinds_of, label, round_times, title
from plait.simulation.timeline import Timeline

_HUES = {Kind.F: (213, 88), Kind.B: (27, 92), Kind.I: (338, 78), Kind.W: (156, 52)}
"""Hue and saturation of each kind; lightness goes from the first micro-batch to the last."""

_LIGHTNESS = 58, 78
_MARGIN, _RANK, _TOP, _ROW, _GAP, _BOTTOM = 12, 58, 64, 34, 6, 34
_LETTER = 7.2  # width of a digit or a capital in a cell, with the room that it needs around it

_STYLE = """\
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #76808c }
.title { font-size: 15px; font-weight: 600 }
.cell { font-size: 11px; font-weight: 600; fill: #0b1526; text-anchor: middle; pointer-events: none }
.time { font-size: 11px; text-anchor: middle }
.track { fill: #8a94a0; fill-opacity: .13 }
.grid { stroke: #8a94a0; stroke-opacity: .3 }"""


def draw_svg(
    timeline: Timeline,
    *,
    width: int = 800,
    name: str | None = None,
    rows: Sequence[tuple[str, int]] | None = None,
) -> str:
    """`timeline` as an SVG document of `width` pixels: a row per rank, a colour per kind of action.

    Later micro-batches are lighter. Pointing at a cell shows its action and times. `name` stands above it,
    by default the schedule's. `rows`: a label and a rank of the schedule for each row, where other rows are
    wanted, such as one for each rank of a mesh.
    """
    ranks = [(f"rank {rank}", rank) for rank in range(timeline.schedule.ranks)]
    return _Picture(timeline, width, name or title(timeline.schedule), rows or ranks).document()


def shade(kind: Kind, part: float) -> str:
    """The colour of a kind, as `#rrggbb`: `part` goes from 0, the first micro-batch, to 1, the last."""
    (hue, saturation), (low, high) = _HUES[kind], _LIGHTNESS
    lightness = low + part * (high - low)
    red, green, blue = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    width: int
    name: str
    rows: Sequence[tuple[str, int]]

    @property
    def bottom(self) -> int:
        """Where the last row ends."""
        return _TOP + len(self.rows) * (_ROW + _GAP) - _GAP

    @property
    def plot(self) -> int:
        """How wide the makespan is."""
        return self.width - 2 * _MARGIN - _RANK

    def wide(self, ticks: int) -> float:
        """So much time in pixels."""
        return ticks / max(self.timeline.length, 1) * self.plot

    def document(self) -> str:
        height = self.bottom + _BOTTOM
        name = escape(self.name)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img">',
            f"<title>{name}</title>",
            f"<style>\n{_STYLE}\n</style>",
            *self.heading(name),
            *self.axis(),
            *(part for number in range(len(self.rows)) for part in self.row(number)),
            "</svg>\n",
        ]
        return "\n".join(parts)

    def heading(self, name: str) -> Iterator[str]:
        timeline = self.timeline
        yield f'<text class="title" x="{_MARGIN}" y="25">{name}</text>'
        yield (
            f'<text x="{_MARGIN}" y="46">makespan {timeline.makespan:g} · bubble {timeline.bubble:.1%} · '
            f"peak activations per rank: {_peaks(timeline)}</text>"
        )
        x = self.width - _MARGIN
        for kind in reversed(kinds_of(timeline)):
            x -= round(7.2 * len(NAMES[kind]))
            yield f'<text x="{x}" y="25">{NAMES[kind]}</text>'
            x -= 25
            yield f'<rect x="{x}" y="13" width="19" height="16" rx="4" fill="{shade(kind, 0.3)}"/>'
            yield f'<text class="cell" x="{x + 9.5}" y="25">{kind}</text>'
            x -= 16

    def axis(self) -> Iterator[str]:
        for time in round_times(self.timeline.makespan, 12):
            x = _MARGIN + _RANK + time / (self.timeline.makespan or 1) * self.plot
            yield f'<path class="grid" d="M{x:.1f} {_TOP - 4}V{self.bottom + 8}"/>'
            yield f'<text class="time" x="{x:.1f}" y="{self.bottom + 22}">{time:g}</text>'

    def row(self, number: int) -> Iterator[str]:
        name, rank = self.rows[number]
        y = _TOP + number * (_ROW + _GAP)
        middle = y + _ROW / 2 + 4
        left = _MARGIN + _RANK
        yield f'<text x="{_MARGIN}" y="{middle:g}">{escape(name)}</text>'
        yield f'<rect class="track" x="{left}" y="{y}" width="{self.plot}" height="{_ROW}" rx="5"/>'
        for action, start, end in self.timeline.cells[rank]:
            wide = self.wide(end - start)
            gap = min(1.5, wide / 8)
            x, wide = left + self.wide(start - self.timeline.first) + gap / 2, wide - gap
            times = f"{self.timeline.time(start):g} to {self.timeline.time(end):g}"
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" rx="{min(4.5, wide / 4):.2g}" '
                f'fill="{self.fill(action)}"><title>{action}: {times}</title></rect>'
            )
            if text := self.written[action.kind](action):
                yield f'<text class="cell" x="{x + wide / 2:.2f}" y="{middle:g}">{text}</text>'

    def fill(self, action: Action) -> str:
        return shade(action.kind, action.microbatch / max(self.timeline.schedule.microbatches - 1, 1))

    @cached_property
    def written(self) -> Mapping[Kind, Callable[[Action], str]]:
        """What is written into the cells of each kind: the most that fits into all of them."""
        return {kind: self._fitting(kind) for kind in kinds_of(self.timeline)}

    def _fitting(self, kind: Kind) -> Callable[[Action], str]:
        cells = [cell for row in self.timeline.cells for cell in row if cell.action.kind is kind]
        texts: list[Callable[[Action], str]] = [
            lambda action: label(action, self.timeline.schedule),
            lambda action: str(action.microbatch),
        ]
        for text in texts:
            if all(len(text(action)) * _LETTER <= self.wide(end - start) for action, start, end in cells):
                return text
        return lambda action: ""


def _peaks(timeline: Timeline) -> str:
    peak = timeline.peak
    return " ".join(f"{units:g}" for units in peak) if len(peak) <= 16 else f"up to {max(peak):g}"
