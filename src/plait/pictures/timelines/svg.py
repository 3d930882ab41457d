"""A timeline as one self-contained SVG with a transparent background, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import wrap

from plait.pictures.colours import GREY, MIDDLE, ON_CELL, TEXT, shade
from plait.pictures.timelines.svg_rows import MARGIN, Bands, Cells, Frame, RowLabel, SvgPart
from plait.pictures.timelines.text import KIND_NAMES, amount, kinds_of, round_times, title
from plait.schedules.timed_schedule import TimedSchedule

CROWDED = 3
"""Pixels: where the average action is narrower, bands are drawn instead of actions."""
_STYLE = f"""\
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {TEXT} }}
.title {{ font-size: 15px; font-weight: 600 }}
.cell {{ font-size: 11px; font-weight: 600; fill: {ON_CELL}; text-anchor: middle; pointer-events: none }}
.small {{ font-size: 9px; font-weight: 500 }}
.stage {{ font-size: 9px; text-anchor: end }}
.time {{ font-size: 11px; text-anchor: middle }}
.track {{ fill: {GREY}; fill-opacity: .13 }}
.grid {{ stroke: {GREY}; stroke-opacity: .3 }}"""
_LETTER, _TITLE_LETTER = 6.6, 8.6
"""Average width of a letter in pixels, rounded up, in text and in the title."""
_LINE, _BELOW = 20, 34


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
    body = (Bands if crowded else Cells)(frame, top).rows()
    height = round(top + body.height + _BELOW)
    axis = _axis(frame, top, top + body.height)
    return svg_document(name, width, height, [*heading.elements, *axis, *body.elements])


def svg_document(name: str, width: int, height: int, elements: Iterable[str]) -> str:
    """Return an SVG document of `elements`, which may have the classes of timelines: title, cell, track, ….

    `name`: its accessible name. `width`, `height`: in pixels.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(name)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        *elements,
        "</svg>\n",
    ]
    return "\n".join(lines)


def _heading(frame: Frame, name: str, *, crowded: bool) -> SvgPart:
    timeline, room = frame.timeline, frame.width - 2 * MARGIN
    figures = (
        f"makespan {amount(timeline, timeline.makespan)} · bubble {timeline.bubble:.1%} · "
        f"peak activations per rank: {_peaks(timeline)}"
    )
    elements, y = [], 5.0
    for text, letter, style in ((name, _TITLE_LETTER, ' class="title"'), (figures, _LETTER, "")):
        for line in wrap(text, max(int(room / letter), 8)):
            y += _LINE
            elements.append(f'<text{style} x="{MARGIN}" y="{y:g}">{escape(line)}</text>')
    legend = _legend(frame, y + _LINE + 4, crowded=crowded)
    y += legend.height + 14
    if frame.chunks > 1 and not crowded:
        y += 8
        elements.append(f'<text class="stage" x="{frame.left - 5:g}" y="{y - 5:g}">stage</text>')
    return SvgPart(elements + legend.elements, y)


def _legend(frame: Frame, y: float, *, crowded: bool) -> SvgPart:
    """Return the legend, with the kinds of action that occur, in lines from `y` down."""
    elements: list[str] = []
    first, x = y, float(MARGIN)
    notes = ["height: share of the time; empty: idle"] if crowded else []
    if frame.timeline.schedule.microbatches > 1 and not crowded:
        notes = ["later micro-batches are lighter"]
    for kind, text in [
        *((kind, KIND_NAMES[kind]) for kind in kinds_of(frame.timeline)),
        *((None, note) for note in notes),
    ]:
        wide = _LETTER * len(text) + (25 if kind else 0)
        if x > MARGIN and x + wide > frame.width - MARGIN:
            x, y = MARGIN, y + _LINE
        if kind:
            elements.append(
                f'<rect x="{x:g}" y="{y - 12:g}" width="19" height="16" rx="4" fill="{shade(kind, MIDDLE)}"/>'
            )
            elements.append(f'<text class="cell" x="{x + 9.5:g}" y="{y:g}">{kind}</text>')
        elements.append(f'<text x="{x + (25 if kind else 0):g}" y="{y:g}">{text}</text>')
        x += wide + 18
    return SvgPart(elements, y - first + _LINE + 4)


def _axis(frame: Frame, top: float, bottom: float) -> Iterator[str]:
    """Yield grid lines at round times, with times below them and the unit in front."""
    timeline = frame.timeline
    yield f'<text x="{MARGIN}" y="{bottom + 22:g}">{timeline.unit or "time"}</text>'
    for time in round_times(timeline.makespan, max(2, min(12, int(frame.plot / 45)))):
        x = frame.left + time / (timeline.makespan or 1) * frame.plot
        yield f'<path class="grid" d="M{x:.1f} {top - 4:g}V{bottom + 8:g}"/>'
        yield f'<text class="time" x="{x:.1f}" y="{bottom + 22:g}">{time:g}</text>'


def _peaks(timeline: TimedSchedule) -> str:
    peak = timeline.peak
    return " ".join(f"{units:g}" for units in peak) if len(peak) <= 16 else f"up to {max(peak):g}"
