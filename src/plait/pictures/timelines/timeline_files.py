"""A timeline as a file: SVG, HTML, PyTorch's CSV, or a Chrome trace for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from plait.errors import ConfigError
from plait.pictures.timelines.html import draw_html
from plait.pictures.timelines.svg import draw_svg
from plait.pictures.timelines.text import KIND_NAMES, title
from plait.pictures.timelines.timeline import Timeline
from plait.schedules.lowering.messages import sends_and_receives
from plait.schedules.timed_schedule import Cell
from plait.schedules.torch_csv import to_csv

FORMATS = ("svg", "html", "trace", "csv")
TraceEvent: TypeAlias = dict[str, object]
_NANOSECONDS = 1_000_000
"""Nanoseconds of the trace in a unit of the costs, which so shows as a millisecond."""
_INSIDE = 1000
"""Largest distance, in nanoseconds, of the ends of an arrow from the edges of its actions."""
_PROCESS, _FIRST_THREAD = 1, 100
"""In Perfetto thread 0 is the process itself, and the thread with the process number the main thread."""


def write_pictures(
    timeline: Timeline, paths: Mapping[str, Path], *, name: str | None = None
) -> Iterator[Path]:
    """Write `timeline` to each of `paths` in the format that is its key; yield each path once it is written.

    `name` is the title, by default the schedule's. Raises ConfigError for a file that cannot be written.
    """
    for kind, path in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(picture(timeline, kind, name=name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): give another file.") from None
        yield path


def picture(timeline: Timeline, kind: str, *, name: str | None = None) -> str:
    """Return `timeline` in one of `FORMATS`: SVG, HTML, Chrome trace, or the schedule as PyTorch's CSV."""
    if kind == "csv":
        return to_csv(timeline.schedule)
    draw = {"svg": draw_svg, "html": draw_html, "trace": draw_trace}[kind]
    return draw(timeline, name=name)


def draw_trace(timeline: Timeline, *, name: str | None = None) -> str:
    """Return `timeline` in the Chrome trace event format, as JSON. A unit of the costs is a millisecond.

    The pipeline is a process and each rank a thread of it, with its actions, arrows for messages between
    ranks, and a counter of the rank's memory, in micro-batches. Times are rounded to a nanosecond, the
    resolution of readers: a millionth of a unit. `name` is the title, by default the schedule's.
    """
    name = name or title(timeline.schedule)
    events = [*_names(timeline, name), *_actions(timeline), *_arrows(timeline), *_memory(timeline)]
    about = {"schedule": name, "time": "1 ms is a unit of the costs"}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def _names(timeline: Timeline, name: str) -> Iterator[TraceEvent]:
    yield _event("M", "process_name", 0, args={"name": name})
    for rank in range(timeline.schedule.ranks):
        yield _event("M", "thread_name", rank, args={"name": f"rank {rank}"})
        yield _event("M", "thread_sort_index", rank, args={"sort_index": rank})


def _actions(timeline: Timeline) -> Iterator[TraceEvent]:
    for rank, row in enumerate(timeline.cells):
        for action, start, end in row:
            begin, done = _nanoseconds(timeline, start), _nanoseconds(timeline, end)
            yield _event(
                "X",
                str(action),
                rank,
                ts=_microseconds(begin),
                dur=_microseconds(done - begin),
                cat=KIND_NAMES[action.kind],
                args={"stage": action.stage, "microbatch": action.microbatch},
            )


def _arrows(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield arrows from each sending action to the action that receives its result.

    Readers bind each end of an arrow to the action that runs at its time. Where one action ends, another may
    begin, so arrows begin and end a little inside; those of actions too short for that are left out.
    """
    schedule = timeline.schedule
    number = 0
    for sender, receiver in sends_and_receives(timeline.cells, schedule):
        before, after = _inside(timeline, sender), _inside(timeline, receiver)
        if before and after:
            sent = _microseconds(_nanoseconds(timeline, sender.end) - before)
            received = _microseconds(_nanoseconds(timeline, receiver.start) + after)
            first, second = (schedule.rank_of[cell.action.stage] for cell in (sender, receiver))
            yield _event("s", "result", first, ts=sent, cat="result", id=number)
            yield _event("f", "result", second, ts=received, cat="result", id=number, bp="e")
            number += 1


def _memory(timeline: Timeline) -> Iterator[TraceEvent]:
    digits = len(str(timeline.schedule.ranks - 1))  # the same for all ranks, as readers sort by name
    for rank, steps in enumerate(timeline.memory_curve):
        for tick, units in steps:
            held = float(units * timeline.memory_costs.unit)
            time = _microseconds(_nanoseconds(timeline, tick))
            yield _event("C", f"held by rank {rank:0{digits}}", rank, ts=time, args={"micro-batches": held})


def _event(phase: str, name: str, rank: int, **rest: object) -> TraceEvent:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": _FIRST_THREAD + rank, **rest}


def _inside(timeline: Timeline, cell: Cell) -> int:
    return min(_INSIDE, (_nanoseconds(timeline, cell.end) - _nanoseconds(timeline, cell.start)) // 4)


def _nanoseconds(timeline: Timeline, tick: int) -> int:
    """Return the trace time of `tick`, rounded so that an action ends exactly where the next one starts."""
    numerator, denominator = timeline.tick.as_integer_ratio()
    return (2 * tick * numerator * _NANOSECONDS + denominator) // (2 * denominator)


def _microseconds(nanoseconds: int) -> float:
    """Convert `nanoseconds` to microseconds, the unit of the trace format; an integral value is an int."""
    return nanoseconds / 1000 if nanoseconds % 1000 else nanoseconds // 1000
