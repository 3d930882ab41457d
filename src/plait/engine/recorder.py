"""The recorder of one rank: notes when each action of a training step starts and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.engine.clock import Clock
from plait.pipeline.executor import AroundSegment
from plait.schedules.action import Action
from plait.schedules.segments import Segment
from plait.schedules.simulation.measured import MeasuredAction


class SegmentTimes(NamedTuple):
    """A segment that has run, and the clock's stamps before and after it."""

    segment: Segment
    start: Any
    end: Any


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A training step that was recorded on this rank."""

    clock: Clock
    notes: Sequence[SegmentTimes]

    def row(self) -> tuple[MeasuredAction, ...]:
        """Return the actions in the order in which they ran. On a GPU it waits for the device."""
        segments, starts, ends = zip(*self.notes, strict=True)
        return joined(segments, self.clock.read(starts), self.clock.read(ends))


class Recorder:
    """Notes the clock before and after each segment of the training steps that an executor runs."""

    def __init__(self, start_clock: Callable[[], Clock]) -> None:
        """`start_clock` is called as each step begins."""
        self._start_clock = start_clock
        self.step: RecordedStep | None = None
        """The last training step that ended."""

    @contextmanager
    def recording_step(self) -> Iterator[AroundSegment]:
        """Yield what makes the contexts in which the segments of a step run. A step that fails is dropped."""
        clock, notes = self._start_clock(), list[SegmentTimes]()

        @contextmanager
        def recorded(segment: Segment) -> Iterator[None]:
            start = clock.stamp()
            yield
            notes.append(SegmentTimes(segment, start, clock.stamp()))

        yield lambda segment: recorded(segment) if segment.computes or segment.awaits else nullcontext()
        self.step = RecordedStep(clock, notes)


def joined(
    segments: Sequence[Segment], starts: Sequence[int], ends: Sequence[int]
) -> tuple[MeasuredAction, ...]:
    """Return the actions of `segments`, each from the start of its first to the end of its last.

    What runs between the segments of an action counts as part of it: waiting for parameters, for example. The
    gradient that a backward starts from is a segment of an `I`, also where the action is a `B`.
    """
    row: list[MeasuredAction] = []
    asked: dict[Action, int] = {}
    for segment, start, end in zip(segments, starts, ends, strict=True):
        action = segment.computes
        if segment.awaits is not None:
            asked[segment.awaits] = start
        elif action is None:
            continue
        elif row and row[-1].action in (action, action.message_key):
            row[-1] = row[-1]._replace(action=action, end=end)
        else:
            row.append(MeasuredAction(action, start, end, asked.pop(action.message_key, None)))
    return tuple(row)
