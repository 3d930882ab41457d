"""A timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias

from plait.schedules.simulation.memory_curve import memory_changes
from plait.schedules.simulation.text import NAMES, title
from plait.schedules.simulation.timeline import Cell, Timeline

Event: TypeAlias = dict[str, object]

_NANOSECONDS = 1_000_000
"""Of the trace, in a unit of the costs: a unit shows as a millisecond."""
_INSIDE = 1000
"""By how many nanoseconds an arrow begins and ends inside its actions, at most."""
_PROCESS, _FIRST_THREAD = 1, 100
"""Perfetto takes thread 0 for the process itself, and the thread with its number for the main one."""


def draw_trace(timeline: Timeline, *, name: str | None = None) -> str:
    """`timeline` in the Chrome trace event format, as JSON. A unit of the costs shows as a millisecond.

    The pipeline is a process and each rank a thread of it, with its actions, arrows from what makes a result
    to what takes it on another rank, and a counter of what the rank holds, in micro-batches. Times are
    rounded to a nanosecond, the finest that readers keep: a millionth of a unit. `name` is the title, by
    default the schedule's.
    """
    name = name or title(timeline.schedule)
    events = [*_names(timeline, name), *_actions(timeline), *_arrows(timeline), *_memory(timeline)]
    about = {"schedule": name, "time": "1 ms is a unit of the costs"}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def _names(timeline: Timeline, name: str) -> Iterator[Event]:
    yield _event("M", "process_name", 0, args={"name": name})
    for rank in range(timeline.schedule.ranks):
        yield _event("M", "thread_name", rank, args={"name": f"rank {rank}"})
        yield _event("M", "thread_sort_index", rank, args={"sort_index": rank})


def _actions(timeline: Timeline) -> Iterator[Event]:
    for rank, row in enumerate(timeline.cells):
        for action, start, end in row:
            begin, done = _nanoseconds(timeline, start), _nanoseconds(timeline, end)
            yield _event(
                "X",
                str(action),
                rank,
                ts=_microseconds(begin),
                dur=_microseconds(done - begin),
                cat=NAMES[action.kind],
                args={"stage": action.stage, "microbatch": action.microbatch},
            )


def _arrows(timeline: Timeline) -> Iterator[Event]:
    """From each action whose result goes to another rank to the one that takes it.

    Readers bind each end of an arrow to the action that runs at its time. Where one action ends, another may
    begin, so arrows begin and end a little inside; those of actions too short for that are left out.
    """
    schedule = timeline.schedule
    takers = {cell.action.message_key: cell for row in timeline.cells for cell in row}
    number = 0
    for rank, row in enumerate(timeline.cells):
        for cell in row:
            consumer = cell.action.consumer(schedule.stages)
            taker = takers.get(consumer) if consumer else None
            if taker is None or schedule.rank_of[taker.action.stage] == rank:
                continue
            before, behind = _inside(timeline, cell), _inside(timeline, taker)
            if before and behind:
                sent = _microseconds(_nanoseconds(timeline, cell.end) - before)
                taken = _microseconds(_nanoseconds(timeline, taker.start) + behind)
                there = schedule.rank_of[taker.action.stage]
                yield _event("s", "result", rank, ts=sent, cat="result", id=number)
                yield _event("f", "result", there, ts=taken, cat="result", id=number, bp="e")
                number += 1


def _memory(timeline: Timeline) -> Iterator[Event]:
    digits = len(str(timeline.schedule.ranks - 1))  # the same for all ranks, as readers sort by name
    for rank, steps in enumerate(memory_changes(timeline)):
        for tick, units in steps:
            held = float(units * timeline.memory_costs.unit)
            time = _microseconds(_nanoseconds(timeline, tick))
            yield _event("C", f"held by rank {rank:0{digits}}", rank, ts=time, args={"micro-batches": held})


def _event(phase: str, name: str, rank: int, **rest: object) -> Event:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": _FIRST_THREAD + rank, **rest}


def _inside(timeline: Timeline, cell: Cell) -> int:
    return min(_INSIDE, (_nanoseconds(timeline, cell.end) - _nanoseconds(timeline, cell.start)) // 4)


def _nanoseconds(timeline: Timeline, tick: int) -> int:
    """Of the trace, rounded, so that an action ends exactly where the next one begins."""
    numerator, denominator = timeline.tick.as_integer_ratio()
    return (2 * (tick - timeline.first) * numerator * _NANOSECONDS + denominator) // (2 * denominator)


def _microseconds(nanoseconds: int) -> float:
    """As the format wants them; whole ones as such."""
    return nanoseconds / 1000 if nanoseconds % 1000 else nanoseconds // 1000
