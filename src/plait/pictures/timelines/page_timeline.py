"""The interactive timeline of a page: its data, style, markup and script; the page of a schedule has one.

The folder `page` has the parts. The scripts in `_SCRIPTS` are, in this order, the body of the function
`drawTimeline(root, packed, keepsAddress)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from importlib import resources
from string import Template

from plait.pictures.colours import MIDDLE, shade
from plait.pictures.timelines.text import KIND_NAMES
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
    """A rank in a timeline: its actions, and the waits in which it was blocked, in order, in ticks."""

    label: str
    cells: Sequence[Cell]
    pipeline: int = 0
    """Ranks of the same pipeline pass each other the results of a micro-batch."""
    blocked: Sequence[Span] = ()


@dataclass(frozen=True)
class TimeAxis:
    """The ticks from `first` on, `length` of them, of `tick` units of time each."""

    first: int
    length: int
    tick: Fraction
    unit: str = ""

    @property
    def scale(self) -> int:
        """The number of ticks that count as one in the page."""
        return max(1, -(-self.length // _LARGEST))

    def ticks(self, tick: int) -> int:
        """Return the ticks of the page from the start until `tick`."""
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
    """Return the data for `drawTimeline`. Times are whole ticks, each relative to the previous one.

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
    """Return the script that defines `drawTimeline(root, packed, keepsAddress)`."""
    body = "\n".join(page_file(script) for script in _SCRIPTS)
    seen = "{chart, base, glass, blend, hint, timeline, view, layout, xOf, rowTop, stripTop, showCard}"
    return (
        "// Draws a timeline into `root`, and returns what it draws with; `keepsAddress`: the visible range\n"
        "// is in the address of the page.\n"
        f"function drawTimeline(root, packed, keepsAddress) {{\n'use strict';\n{body}\n"
        f"return {seen};\n}}\n"
    )


def timeline_markup(
    name: str, kinds: Iterable[Kind], axes: Sequence[tuple[str, str]] = (), id: str = "timeline"
) -> str:
    """Return the HTML element that `drawTimeline` draws into, with a legend of actions and waits."""
    legend = [
        f'<li><b style="background: {shade(kind, MIDDLE)}">{kind}</b> {KIND_NAMES[kind]}</li>'
        for kind in kinds
    ]
    legend += [
        f'<li><b class="lane" style="background: var(--{colour})"></b> blocked, {escape(axis)}</li>'
        for axis, colour in axes
    ]
    return Template(page_file("timeline.html")).substitute(id=id, name=escape(name), legend="\n".join(legend))


def page_file(name: str) -> str:
    """Return the text of a file in the folder `page`."""
    return (resources.files("plait.pictures.timelines") / "page" / name).read_text(encoding="utf-8")
