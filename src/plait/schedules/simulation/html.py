"""A timeline as one self-contained, interactive HTML page, including a memory chart.

The folder `page` has the document, its style, and its scripts, which run in the order of `_SCRIPTS`. This
module fills in the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib import resources
from string import Template

from plait.schedules.simulation.colours import MIDDLE, page_colours, shade
from plait.schedules.simulation.terminal import KIND_NAMES, amount, kinds_of, title
from plait.schedules.simulation.timeline import Timeline

_SCRIPTS = "data.js", "view.js", "draw.js", "hints.js", "events.js"
_LARGEST = 2**53
"""Largest integer up to which JavaScript is exact."""
_KINDS = tuple(KIND_NAMES)


def draw_html(timeline: Timeline, *, name: str | None = None) -> str:
    """Return `timeline` as an HTML document without external resources, for windows of any width.

    It shows the figures as text, a row per rank in the colours of `draw_svg`, and the memory of each rank
    over time. Pointing at an action, or choosing it with the arrow keys, shows its times, what it waited for,
    and the rest of its micro-batch. Wheel, keys, two fingers and buttons zoom; the visible range is in the
    fragment of the address, in the unit of the costs: `#from=10&to=20`. `name` is the title, by default the
    schedule's.
    """
    return Template(_page("page.html")).substitute(
        name=escape(name or title(timeline.schedule)),
        style=page_colours() + _page("page.css"),
        figures="\n".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
            for label, value in _figures(timeline)
        ),
        legend="\n".join(
            f'<li><b style="background: {shade(kind, MIDDLE)}">{kind}</b> {KIND_NAMES[kind]}</li>'
            for kind in kinds_of(timeline)
        ),
        data=json.dumps(_data(timeline), separators=(",", ":")),
        scripts="\n".join(f"<script>\n{_page(script)}</script>" for script in _SCRIPTS),
    )


def _page(file: str) -> str:
    return (resources.files("plait.schedules.simulation") / "page" / file).read_text(encoding="utf-8")


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


def _data(timeline: Timeline) -> dict[str, object]:
    """Return the data for the page's scripts, escaped so that no text can end the script element.

    Times are whole ticks, each relative to the previous one in its row.
    """
    schedule = timeline.schedule
    scale = max(1, -(-timeline.length // _LARGEST))

    def ticks(tick: int) -> int:
        return (tick - timeline.first) // scale

    def cells(rank: int) -> Iterator[int]:
        last = 0
        for (stage, kind, microbatch), start, end in timeline.cells[rank]:
            yield from (stage, _KINDS.index(kind), microbatch, ticks(start) - last, ticks(end) - ticks(start))
            last = ticks(end)

    def memory(rank: int) -> Iterator[int]:
        last = 0
        for tick, units in curves[rank]:
            yield from (ticks(tick) - last, units)
            last = ticks(tick)

    curves = timeline.memory_curve
    parts = [batch / max(schedule.microbatches - 1, 1) for batch in range(schedule.microbatches)]
    return {
        "tick": float(timeline.tick * scale),
        "timeUnit": timeline.unit,
        "length": ticks(timeline.first + timeline.length),
        "hop": timeline.hop // scale,
        "microbatches": schedule.microbatches,
        "rankOf": schedule.rank_of,
        "kinds": [[kind, KIND_NAMES[kind], [shade(kind, part) for part in parts]] for kind in _KINDS],
        "cells": [list(cells(rank)) for rank in range(schedule.ranks)],
        "unit": float(timeline.memory_costs.unit),
        "memory": [list(memory(rank)) for rank in range(schedule.ranks)],
        "peak": timeline.peak,
    }
