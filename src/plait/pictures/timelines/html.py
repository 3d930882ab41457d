"""A timeline as one self-contained, interactive HTML page, including a memory chart.

The folder `page` has the parts. The scripts in `_SCRIPTS` are, in this order, the body of the function
`drawTimeline(root, packed, keepsAddress)`, which draws the timeline of any page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape

from plait.pictures.colours import LEGEND_SHADE, page_colours, shade
from plait.pictures.html_elements import document, figure, filled_template, page_file
from plait.pictures.quantities import with_unit
from plait.pictures.timelines.text import KIND_NAMES, kinds_of, title
from plait.pictures.timelines.timeline import Timeline
from plait.schedules.action import Kind
from plait.schedules.timed_schedule import Cell

Span = tuple[int, int, int]
"""Index of an axis, start and end in ticks."""

_SCRIPTS = "data.js", "view.js", "draw.js", "hints.js", "events.js"
_LARGEST = 2**53
"""Largest integer up to which JavaScript is exact."""
_KINDS = tuple(KIND_NAMES)


@dataclass(frozen=True)
class TimelineRow:
    """A row of a timeline for one rank: its actions and its waits, in order, in ticks (units of time)."""

    label: str
    cells: Sequence[Cell]
    pipeline: int = 0
    """Ranks of the same pipeline pass each other the results of a micro-batch."""
    blocked: Sequence[Span] = ()


@dataclass(frozen=True)
class TimeAxis:
    """The time axis of a timeline: `length` ticks from tick `first`, each `tick` units of time long."""

    first: int
    length: int
    tick: Fraction
    unit: str = ""

    @property
    def scale(self) -> int:
        """How many ticks are one unit of the page's time, so that JavaScript's integers stay exact."""
        return max(1, -(-self.length // _LARGEST))

    def ticks(self, tick: int) -> int:
        """Convert `tick` to the page's unit of time: counted from the axis's start, in units of `scale`."""
        return (tick - self.first) // self.scale


def timeline_data(
    rows: Sequence[TimelineRow],
    axis: TimeAxis,
    *,
    microbatches: int,
    stage_ranks: Sequence[int],
    hop: int = 0,
    axes: Sequence[tuple[str, str]] = (),
) -> dict[str, object]:
    """Return a timeline as data for the page's function `drawTimeline`: times in ticks, as differences.

    `hop`: the duration of a message in ticks. `axes`: name and colour of the axes along which ranks wait.
    """

    def packed(spans: Iterable[tuple[Sequence[int], int, int]]) -> Iterator[int]:
        last = 0
        for about, start, end in spans:
            begin, done = axis.ticks(start), axis.ticks(end)
            yield from (*about, begin - last, done - begin)
            last = done

    def cells(row: TimelineRow) -> list[int]:
        numbers = (
            ((one.stage, _KINDS.index(one.kind), one.microbatch), start, end) for one, start, end in row.cells
        )
        return list(packed(numbers))

    parts = [batch / max(microbatches - 1, 1) for batch in range(microbatches)]
    return {
        "tick": float(axis.tick * axis.scale),
        "timeUnit": axis.unit,
        "length": axis.ticks(axis.first + axis.length),
        "hop": hop // axis.scale,
        "microbatches": microbatches,
        "rankOf": list(stage_ranks),
        "kinds": [[kind, KIND_NAMES[kind], [shade(kind, part) for part in parts]] for kind in _KINDS],
        "labels": [row.label for row in rows],
        "pipelineOf": [row.pipeline for row in rows],
        "cells": [cells(row) for row in rows],
        "axes": list(axes),
        "blocked": [list(packed(((name,), start, end) for name, start, end in row.blocked)) for row in rows]
        if axes
        else None,
        "memory": None,
    }


def timeline_script() -> str:
    """Return the JavaScript that defines `drawTimeline(root, packed, keepsAddress)`."""
    body = "\n".join(page_file(f"timelines/page/{script}") for script in _SCRIPTS)
    seen = "{chart, base, glass, blend, hint, timeline, view, layout, xOf, rowTop, stripTop, showCard}"
    return (
        "// Draws a timeline into `root`, and returns what it draws with; `keepsAddress`: the visible range\n"
        "// is in the address of the page.\n"
        f"function drawTimeline(root, packed, keepsAddress) {{\n'use strict';\n{body}\n"
        f"return {seen};\n}}\n"
    )


def script_of_one_timeline(*, keeps_address: bool) -> str:
    """Return the JavaScript that draws the page's data, one timeline, into its element `timeline`.

    `keeps_address`: whether the visible range is in the address of the page.
    """
    return (
        f"{timeline_script()}const drawn = drawTimeline(\n"
        "  document.getElementById('timeline'), JSON.parse(document.getElementById('data').textContent), "
        f"{str(keeps_address).lower()});\n"
    )


def timeline_markup(
    name: str, kinds: Iterable[Kind], axes: Sequence[tuple[str, str]] = (), id: str = "timeline"
) -> str:
    """Return the HTML element into which `drawTimeline` draws, with a legend of actions and waits."""
    legend = [
        f'<li><b style="background: {shade(kind, LEGEND_SHADE)}">{kind}</b> {KIND_NAMES[kind]}</li>'
        for kind in kinds
    ]
    legend += [
        f'<li><b class="lane" style="background: var(--{colour})"></b> blocked, {escape(axis)}</li>'
        for axis, colour in axes
    ]
    return filled_template("timelines/page/timeline.html", id=id, name=escape(name), legend="\n".join(legend))


def draw_html(timeline: Timeline, *, name: str | None = None) -> str:
    """Return `timeline` as an HTML document without external resources, for windows of any width.

    It shows the figures as text, a row per rank in the colours of `draw_svg`, and the memory of each rank
    over time. Pointing at an action, or choosing it with the arrow keys, shows its times, what it waited for,
    and the rest of its micro-batch. Wheel, keys, two fingers and buttons zoom; the visible range is in the
    fragment of the address, in the unit of the costs: `#from=10&to=20`. `name` is the title, by default the
    schedule's.
    """
    name = name or title(timeline.schedule)
    styles = "timelines/page/page.css", "timelines/page/timeline.css"
    body = filled_template(
        "timelines/page/page.html",
        title=escape(name),
        figures="\n".join(figure(*one) for one in _figures(timeline)),
        timeline=timeline_markup(name, kinds_of(timeline)),
    )
    return document(
        name,
        body,
        style=page_colours() + "".join(map(page_file, styles)),
        data=simulated_data(timeline),
        scripts=[script_of_one_timeline(keeps_address=True)],
    )


def _figures(timeline: Timeline) -> Iterator[tuple[str, str]]:
    schedule, peak = timeline.schedule, timeline.peak
    yield "policy", schedule.policy
    yield "ranks", str(schedule.ranks)
    yield "micro-batches", str(schedule.microbatches)
    yield "chunks per rank", f"{schedule.stages / schedule.ranks:g}"
    yield "makespan", with_unit(timeline.makespan, timeline.unit)
    yield "span of the longest rank", with_unit(timeline.span, timeline.unit)
    yield "bubble", f"{timeline.bubble:.1%}"
    yield "bubble of the span", f"{timeline.bubble_span:.1%}"
    many = len(peak) > 16
    peaks = f"{min(peak):g} to {max(peak):g}" if many else " ".join(f"{units:g}" for units in peak)
    yield "peak per rank, in micro-batches", peaks
    if schedule.bound is not None:
        yield "lower bound of the search", f"{schedule.bound:g}"


def simulated_data(timeline: Timeline) -> dict[str, object]:
    """Return a simulated timeline as data for `drawTimeline`, with the memory of each rank."""
    schedule = timeline.schedule
    axis = TimeAxis(0, timeline.length, timeline.tick, timeline.unit)

    def memory(rank: int) -> Iterator[int]:
        last = 0
        for tick, units in timeline.memory_curve[rank]:
            yield from (axis.ticks(tick) - last, units)
            last = axis.ticks(tick)

    ranks = range(schedule.ranks)
    rows = [TimelineRow(f"rank {rank}", timeline.cells[rank]) for rank in ranks]
    data = timeline_data(
        rows, axis, microbatches=schedule.microbatches, stage_ranks=schedule.rank_of, hop=timeline.hop
    )
    return data | {
        "unit": float(timeline.memory_costs.unit),
        "memory": [list(memory(rank)) for rank in ranks],
        "peak": timeline.peak,
    }
