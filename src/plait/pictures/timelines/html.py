"""A timeline as one self-contained, interactive HTML page, including a memory chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from string import Template

from plait.pictures.colours import page_colours
from plait.pictures.timelines.page_timeline import (
    TimeAxis,
    TimelineRow,
    page_file,
    timeline_data,
    timeline_markup,
    timeline_script,
)
from plait.pictures.timelines.text import amount, kinds_of, title
from plait.pictures.timelines.timeline import Timeline


def draw_html(timeline: Timeline, *, name: str | None = None) -> str:
    """Return `timeline` as an HTML document without external resources, for windows of any width.

    It shows the figures as text, a row per rank in the colours of `draw_svg`, and the memory of each rank
    over time. Pointing at an action, or choosing it with the arrow keys, shows its times, what it waited for,
    and the rest of its micro-batch. Wheel, keys, two fingers and buttons zoom; the visible range is in the
    fragment of the address, in the unit of the costs: `#from=10&to=20`. `name` is the title, by default the
    schedule's.
    """
    name = name or title(timeline.schedule)
    return Template(page_file("page.html")).substitute(
        name=escape(name),
        style=page_colours() + page_file("page.css") + page_file("timeline.css"),
        figures="\n".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
            for label, value in _figures(timeline)
        ),
        timeline=timeline_markup(name, kinds_of(timeline)),
        data=json.dumps(simulated_data(timeline), separators=(",", ":")),
        script=timeline_script(),
    )


def _figures(timeline: Timeline) -> Iterator[tuple[str, str]]:
    schedule, peak = timeline.schedule, timeline.peak
    yield "policy", schedule.policy
    yield "ranks", str(schedule.ranks)
    yield "micro-batches", str(schedule.microbatches)
    yield "chunks per rank", f"{schedule.stages / schedule.ranks:g}"
    yield "makespan", amount(timeline, timeline.makespan)
    yield "span of the longest rank", amount(timeline, timeline.span)
    yield "bubble", f"{timeline.bubble:.1%}"
    yield "bubble of the span", f"{timeline.bubble_span:.1%}"
    many = len(peak) > 16
    peaks = f"{min(peak):g} to {max(peak):g}" if many else " ".join(f"{units:g}" for units in peak)
    yield "peak per rank, in micro-batches", peaks
    if schedule.bound is not None:
        yield "lower bound of the search", f"{schedule.bound:g}"


def simulated_data(timeline: Timeline) -> dict[str, object]:
    """Return the data for `drawTimeline`, with the memory of each rank."""
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
