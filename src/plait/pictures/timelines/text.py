"""A timeline as text for a terminal: one line per rank, time in columns, readable without colour.

rank 0  F0 F1 ······B0--- ···B1---      1f1b of 2 micro-batches: an action is its label and dashes
rank 1  ···F0 B0--- F1 B1--- ······     while it runs, idle time is dots
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.pictures.colours import TERMINAL
from plait.pictures.quantities import microbatches_text, round_numbers
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell, TimedSchedule

KIND_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}

_ON, _FAINT, _OFF = "\x1b[38;5;16;48;5;{}m", "\x1b[2m", "\x1b[0m"


def draw_text(timeline: TimedSchedule, *, width: int = 100, colour: bool = False) -> str:
    """Return `timeline` in at most `width` columns: ranks, a time axis and a legend; `colour`: ANSI colours.

    An action shows its kind and micro-batch (`F3`; with several chunks per rank also its stage: `2F3`), or
    its kind alone where there is no room.
    """
    margin = len(_head(timeline.schedule.ranks - 1))
    columns, labelled = _columns(timeline, max(width - margin, 10))
    rows = [
        _head(rank).ljust(margin) + _row(timeline, row, columns, labelled, colour)
        for rank, row in enumerate(timeline.cells)
    ]
    below = [_axis(timeline, columns), _legend(timeline, colour)]
    return "\n".join(line.rstrip() for line in [*rows, *(" " * margin + line for line in below)])


def title(schedule: Schedule) -> str:
    """Return the title of a schedule: policy, ranks and micro-batches."""
    ranks = f"{schedule.ranks} rank{'s' if schedule.ranks > 1 else ''}"
    return f"{schedule.policy}: {ranks}, {microbatches_text(schedule.microbatches)}"


def label(action: Action, schedule: Schedule) -> str:
    """Return the label of `action` in its rank's row, without the stage if the rank has only one."""
    return str(action) if schedule.stages > schedule.ranks else f"{action.kind}{action.microbatch}"


def kinds_of(timeline: TimedSchedule) -> list[Kind]:
    """Return the kinds of action that occur in `timeline`, forward first."""
    present = {action.kind for row in timeline.cells for action, _, _ in row}
    return [kind for kind in KIND_NAMES if kind in present]


def _head(rank: int) -> str:
    return f"rank {rank}  "


def _columns(timeline: TimedSchedule, available: int) -> tuple[int, bool]:
    """Return the width of the time axis in columns, at most `available`, and whether all labels fit."""
    letters: dict[int, int] = {}
    for action, start, end in (cell for row in timeline.cells for cell in row):
        if end > start:
            length = len(label(action, timeline.schedule))
            letters[end - start] = max(letters.get(end - start, 0), length)
    if not letters:
        return 0, False
    for space in (1, 0):
        per_tick = max(-(-(length + space) // ticks) for ticks, length in letters.items())
        if timeline.length * per_tick <= available:
            return timeline.length * per_tick, True
    columns = available // timeline.length * timeline.length or available
    return columns, all(ticks * columns // timeline.length >= length for ticks, length in letters.items())


def _row(timeline: TimedSchedule, row: Sequence[Cell], columns: int, labelled: bool, colour: bool) -> str:
    line, at = "", 0
    for action, start, end in row:
        left, right = (round(tick * columns / (timeline.length or 1)) for tick in (start, end))
        text = label(action, timeline.schedule) if labelled else str(action.kind)
        line += _idle(left - at, colour) + _bar(text, action, right - left, colour)
        at = right
    return line + _idle(columns - at, colour)


def _bar(text: str, action: Action, width: int, colour: bool) -> str:
    if width <= 0:
        return ""
    if colour:
        return f"{_ON.format(TERMINAL[action.kind][action.microbatch % 2])}{text.ljust(width)}{_OFF}"
    apart = " " if width > len(text) > 1 else ""
    return text.ljust(width - len(apart), "-") + apart


def _idle(width: int, colour: bool) -> str:
    return f"{_FAINT}{'·' * width}{_OFF}" if colour and width else "·" * width


def _axis(timeline: TimedSchedule, columns: int) -> str:
    line = ""
    for time in round_numbers(0, timeline.makespan, max(columns // 8, 2)):
        at = round(time / timeline.makespan * columns) if timeline.makespan else 0
        line = line.ljust(at) + f"{time:g}"
    return line


def _legend(timeline: TimedSchedule, colour: bool) -> str:
    entries = []
    for kind in kinds_of(timeline):
        mark = f"{_ON.format(TERMINAL[kind][1])} {kind} {_OFF}" if colour else str(kind)
        entries.append(f"{mark} {KIND_NAMES[kind]}")
    return ", ".join([*entries, "· idle"]) + (f"; time in {timeline.unit}" if timeline.unit else "")
