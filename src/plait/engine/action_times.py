"""`ActionTimes`: the seconds that a rank computes in each training step, by kind of action, without waits."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from plait.engine.pipeline.executor import Calls, RunCalls
from plait.ranks.accelerator import StreamEvent, is_accelerator
from plait.ranks.group import Traffic
from plait.schedules.action import Kind
from plait.schedules.lowering.program import Segment

_SCHEDULER = Path("/proc/thread-self/schedstat")
"""Linux's counts of a thread: nanoseconds on a core, and nanoseconds for which it waited for one."""


class ActionSeconds(NamedTuple):
    """Seconds that a rank computed in one step, by stage and kind of action, without communication waits."""

    own: list[float]
    """Of each of `ActionTimes.keys`, then of the optimizer; also without waits for a core of the host."""
    elapsed: float
    """All actions, with waits for a core, which other processes use."""


class ThreadClock:
    """Clock for computations on the CPU, which on Linux also knows how long the thread waited for a core."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(_SCHEDULER, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)

    def stamp(self) -> tuple[int, int]:
        """Return the time now, and how long this thread has waited for a core (0: unknown), in ns."""
        waited = int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0
        return time.perf_counter_ns(), waited

    def seconds(self, start: tuple[int, int], end: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds between two stamps without waits for a core, and with them."""
        elapsed, waited = end[0] - start[0], end[1] - start[1]
        return (elapsed - waited) / 1e9, elapsed / 1e9


class StreamClock:
    """Clock for computations on a GPU: records events on its current stream, without waits of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> StreamEvent:
        """Record a timed event after all work submitted to the GPU's stream so far, and return it."""
        return StreamEvent(self._device, timed=True)

    def seconds(self, start: StreamEvent, end: StreamEvent) -> tuple[float, float]:
        """Return the seconds between two finished events, twice, since a GPU stream waits for no CPU core."""
        seconds = end.milliseconds_since(start) / 1e3
        return seconds, seconds


ActionClock: TypeAlias = ThreadClock | StreamClock


def clock_for(device: torch.device) -> ActionClock:
    """Return the clock for computations on `device`."""
    return StreamClock(device) if is_accelerator(device) else ThreadClock()


class _Note(NamedTuple):
    """The clock readings of one measured segment: its start, its end, and the waits between them."""

    number: int
    start: Any
    end: Any
    waits: Sequence[tuple[Any, Any]]


class ActionTimes:
    """Measures for how long a rank computes its actions and its optimizer's step, in each training step.

    Two stamps a segment of an action, and two a wait for communication within, which is taken off. On a GPU
    the stamps are events, read when the work is done: the host never waits for the device.
    """

    def __init__(self, stages: Sequence[int], traffic: Traffic, clock: ActionClock) -> None:
        """`stages`: those of the rank. `traffic` counts the rank's waits."""
        self.keys: tuple[tuple[int, Kind], ...] = tuple(product(stages, Kind))
        """Of each time its stage and kind; the optimizer's follows."""
        self.enabled = True
        """Whether what runs now is measured: a training step, and no evaluation."""
        self._numbers = {key: number for number, key in enumerate(self.keys)}
        self._traffic, self._clock = traffic, clock
        self._notes: list[_Note] = []

    def bind(self, segments: Sequence[Segment], runs: Sequence[RunCalls]) -> Sequence[RunCalls]:
        """Return functions that run segments as `runs` do, and time those that compute actions."""
        return [
            run if segment.computes is None else self._measured(run, segment.computes[:2])
            for segment, run in zip(segments, runs, strict=True)
        ]

    def _measured(self, run: RunCalls, key: tuple[int, Kind]) -> RunCalls:
        number = self._numbers[key]

        def measured(calls: Calls) -> None:
            if self.enabled:
                self._measure(number, lambda: run(calls))
            else:
                run(calls)

        return measured

    def measure_optimizer(self, step: Callable[[], object]) -> None:
        """Call `step`, which runs the optimizer's update, and record how long it computes."""
        self._measure(len(self.keys), step)

    def _measure(self, number: int, call: Callable[[], object]) -> None:
        traffic, start = self._traffic, self._clock.stamp()
        traffic.stamp, traffic.stamped_waits = self._clock.stamp, []
        try:
            call()
        finally:
            traffic.stamp = None
        self._notes.append(_Note(number, start, self._clock.stamp(), traffic.stamped_waits))

    def take(self) -> Callable[[], ActionSeconds]:
        """End the measurement of a step; return a function that reads its seconds, once the device is done.

        On a GPU it may be called once the step's work is done.
        """
        notes, self._notes = self._notes, []
        return lambda: self._times(notes)

    def _times(self, notes: Sequence[_Note]) -> ActionSeconds:
        own, passed = [0.0] * (len(self.keys) + 1), 0.0
        for number, start, end, waits in notes:
            seconds, elapsed = self._clock.seconds(start, end)
            for wait in waits:
                waiting, also = self._clock.seconds(*wait)
                seconds, elapsed = seconds - waiting, elapsed - also
            own[number] += max(0.0, seconds)
            passed += elapsed if number < len(self.keys) else 0.0
        return ActionSeconds(own, max(0.0, passed))
