"""A timeline as one self-contained SVG with a transparent background, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from plait.pictures.colours import LEGEND_SHADE, shade
from plait.pictures.quantities import round_numbers, with_unit
from plait.pictures.svg_elements import path, rect, svg_document, text_at
from plait.pictures.timelines.svg_rows import MARGIN, Bands, Cells, Frame, RowLabel, SvgPart
from plait.pictures.timelines.text import KIND_NAMES, kinds_of, title
from plait.schedules.timed_schedule import TimedSchedule

CROWDED = 3
"""Pixels: where the average action is narrower, bands are drawn instead of actions."""
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


def _heading(frame: Frame, name: str, *, crowded: bool) -> SvgPart:
    timeline, room = frame.timeline, frame.width - 2 * MARGIN
    figures = (
        f"makespan {with_unit(timeline.makespan, timeline.unit)} · bubble {timeline.bubble:.1%} · "
        f"peak activations per rank: {_peaks(timeline)}"
    )
    elements, y = [], 5.0
    for text, letter, style in ((name, _TITLE_LETTER, "title"), (figures, _LETTER, "")):
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
    for kind, text in [
        *((kind, KIND_NAMES[kind]) for kind in kinds_of(frame.timeline)),
        *((None, note) for note in notes),
    ]:
        wide = _LETTER * len(text) + (25 if kind else 0)
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


def _peaks(timeline: TimedSchedule) -> str:
    peak = timeline.peak
    return " ".join(f"{units:g}" for units in peak) if len(peak) <= 16 else f"up to {max(peak):g}"
