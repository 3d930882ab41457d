"""A timeline as one self-contained SVG, legible on light and on dark pages: it has no background of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

from plait.schedules.action import Action, Kind
from plait.simulation.text import NAMES, kinds_of, label, round_times
from plait.simulation.timeline import Timeline

_HUES = {Kind.F: (213, 88), Kind.B: (27, 92), Kind.I: (338, 78), Kind.W: (156, 52)}
"""Hue and saturation of each kind; lightness goes from the first micro-batch to the last."""

_LIGHTNESS = 58, 78
_MARGIN, _RANK, _TOP, _ROW, _GAP, _BOTTOM = 12, 58, 64, 34, 6, 34
_LETTER = 7.2  # width of a digit or a capital in a cell, with the room that it needs around it

_STYLE = """\
text { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #76808c }
.title { font-size: 15px; font-weight: 600 }
.cell { font-size: 11.5px; font-weight: 600; fill: #0b1526; text-anchor: middle; pointer-events: none }
.time { font-size: 11px; text-anchor: middle }
.right { text-anchor: end }
.track { fill: #8a94a0; fill-opacity: .13 }
.grid { stroke: #8a94a0; stroke-opacity: .3 }"""


def draw_svg(timeline: Timeline, *, width: int = 800) -> str:
    """`timeline` as an SVG document of `width` pixels: a row per rank, a colour per kind, a shade per micro-batch.

    Its title gives makespan and bubble; pointing at a cell shows its action and times.
    """
    return _Picture(timeline, width).document()


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    width: int

    @cached_property
    def scale(self) -> float:
        """Pixels per tick."""
        return (self.width - 2 * _MARGIN - _RANK) / max(self.timeline.length, 1)

    @property
    def bottom(self) -> int:
        """Where the last row ends."""
        return _TOP + self.timeline.schedule.ranks * (_ROW + _GAP) - _GAP

    def x(self, tick: int) -> float:
        return _MARGIN + _RANK + (tick - self.timeline.first) * self.scale

    def document(self) -> str:
        height = self.bottom + _BOTTOM
        made = self.timeline.schedule
        title = f"{made.policy}: {made.ranks} ranks, {made.microbatches} micro-batches"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            *self.heading(title),
            *self.axis(),
            *(part for rank in range(made.ranks) for part in self.row(rank)),
            "</svg>\n",
        ]
        return "\n".join(parts)

    def heading(self, title: str) -> Iterator[str]:
        timeline = self.timeline
        peaks = " ".join(f"{units:g}" for units in timeline.peak)
        yield f'<text class="title" x="{_MARGIN}" y="25">{escape(title)}</text>'
        yield (
            f'<text x="{_MARGIN}" y="46">makespan {timeline.makespan:g} · bubble {timeline.bubble:.1%} · '
            f"peak activations {peaks}</text>"
        )
        right = self.width - _MARGIN
        for kind in reversed(kinds_of(timeline)):
            yield f'<text class="right" x="{right}" y="25">{NAMES[kind]}</text>'
            right -= round(6.4 * len(NAMES[kind])) + 24
            yield f'<rect x="{right}" y="13" width="18" height="15" rx="3.5" fill="{_shade(kind, 0.3)}"/>'
            yield f'<text class="cell" x="{right + 9}" y="24.5">{kind}</text>'
            right -= 16

    def axis(self) -> Iterator[str]:
        for time in round_times(self.timeline.makespan, 12):
            x = _MARGIN + _RANK + time / float(self.timeline.tick) * self.scale
            yield f'<path class="grid" d="M{x:.4g} {_TOP - 4}V{self.bottom + 8}"/>'
            yield f'<text class="time" x="{x:.4g}" y="{self.bottom + 22}">{time:g}</text>'

    def row(self, rank: int) -> Iterator[str]:
        y = _TOP + rank * (_ROW + _GAP)
        middle = y + _ROW / 2 + 4
        left, right = _MARGIN + _RANK, self.width - _MARGIN
        yield f'<text x="{_MARGIN}" y="{middle:g}">rank {rank}</text>'
        yield f'<rect class="track" x="{left}" y="{y}" width="{right - left}" height="{_ROW}" rx="5"/>'
        for action, start, end in self.timeline.cells[rank]:
            gap = min(1.5, (end - start) * self.scale / 8)
            x, wide = self.x(start) + gap / 2, (end - start) * self.scale - gap
            times = f"{self.timeline.time(start):g} to {self.timeline.time(end):g}"
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" rx="{min(4.5, wide / 4):.2g}" '
                f'fill="{self.fill(action)}"><title>{action}: {times}</title></rect>'
            )
            if text := self.text(action, wide):
                yield f'<text class="cell" x="{x + wide / 2:.2f}" y="{middle:g}">{text}</text>'

    def fill(self, action: Action) -> str:
        return _shade(action.kind, action.microbatch / max(self.timeline.schedule.microbatches - 1, 1))

    def text(self, action: Action, wide: float) -> str:
        """What is written into a cell: as much as fits."""
        full = label(action, self.timeline.schedule)
        return next((text for text in (full, str(action.microbatch)) if len(text) * _LETTER <= wide), "")


def _shade(kind: Kind, part: float) -> str:
    (hue, saturation), (low, high) = _HUES[kind], _LIGHTNESS
    return f"hsl({hue} {saturation}% {low + part * (high - low):.0f}%)"
