"""The recorder of one rank: notes when each action of a training step starts and ends, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.engine.clock import Clock
from plait.pipeline.executor import Around
from plait.schedules.action import Action, Kind
from plait.schedules.program import Program, RunLayer
from plait.schedules.segments import Segment
from plait.schedules.simulation.measured import MeasuredAction


class Note(NamedTuple):
    """A part that was run, and the clock's stamps before and after it."""

    part: Segment
    start: Any
    end: Any


@dataclass(frozen=True, eq=False)
class Step:
    """A training step that was recorded on this rank."""

    clock: Clock
    notes: Sequence[Note]

    def row(self) -> tuple[MeasuredAction, ...]:
        """Its actions, in the order in which they were done. On a GPU it waits for the device."""
        parts, starts, ends = zip(*self.notes, strict=True)
        return joined(parts, self.clock.read(starts), self.clock.read(ends))


class Recorder:
    """Watches an executor (see `Executor.watch`)."""

    def __init__(self, start_clock: Callable[[], Clock]) -> None:
        """`start_clock` is called as each step begins."""
        self._start_clock = start_clock
        self.step: Step | None = None
        """The last training step that ended."""

    @contextmanager
    def watch(self, program: Program) -> Iterator[Around]:
        """Record `program`, if it trains. One that fails leaves what was recorded before."""
        if not _trains(program):
            yield _unnoticed
            return
        clock, notes = self._start_clock(), list[Note]()

        @contextmanager
        def around(part: Segment) -> Iterator[None]:
            start = clock.stamp()
            yield
            notes.append(Note(part, start, clock.stamp()))

        yield lambda part: around(part) if part.computes or part.awaits else _unnoticed(part)
        self.step = Step(clock, notes)


def joined(
    parts: Sequence[Segment], starts: Sequence[int], ends: Sequence[int]
) -> tuple[MeasuredAction, ...]:
    """The actions that `parts` are pieces of, each from the start of its first piece to the end of its last.

    What lies between pieces of an action counts as its own: parameters that it waits for, for example. The
    gradient that a backward starts from is a piece of an `I`, also if the backward goes on as a `B`.
    """
    row: list[MeasuredAction] = []
    asked: dict[Action, int] = {}
    for part, start, end in zip(parts, starts, ends, strict=True):
        action = part.computes
        if part.awaits is not None:
            asked[part.awaits] = start
        elif action is None:
            continue
        elif row and row[-1].action in (action, action.message_key):
            row[-1] = row[-1]._replace(action=action, end=end)
        else:
            row.append(MeasuredAction(action, start, end, asked.pop(action.message_key, None)))
    return tuple(row)


def _trains(program: Program) -> bool:
    return any(isinstance(one, RunLayer) and one.action.kind is not Kind.F for one in program)


def _unnoticed(part: Segment) -> AbstractContextManager[object]:
    return nullcontext()
