"""How long a rank computes in each training step, by kind of action: all the time, without its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch

from plait.engine.pipeline.executor import Calls, RunCalls
from plait.ranks.device import StreamEvent, is_accelerator
from plait.ranks.group import Traffic
from plait.schedules.action import Kind
from plait.schedules.lowering.program import Segment

ReadTimes: TypeAlias = Callable[[], list[float]]
"""Returns the seconds of one step: of each kind of action, in the order of `ActionTimes.keys`, then of the
optimizer."""


class ActionTimes:
    """Measures for how long a rank computes its actions and its optimizer's step, in each training step.

    On a CPU by a clock that stands still while the rank waits for communication: two readings a segment. On a
    GPU by two events a segment on the stream that computes, and two around each wait for communication; they
    are read when the work is done, so that the host never waits for the device.
    """

    def __init__(self, stages: Sequence[int], traffic: Traffic, device: torch.device) -> None:
        """`stages`: those of the rank; `traffic` counts its waits."""
        self.keys: tuple[tuple[int, Kind], ...] = tuple(product(stages, Kind))
        """Of each time its stage and kind; the optimizer's follows."""
        self.enabled = True
        """Whether what runs now is measured; False in evaluations."""
        self._numbers = {key: number for number, key in enumerate(self.keys)}
        self._traffic = traffic
        self._stamp: Callable[[], Any] = self._computing_nanoseconds
        self._notes: list[tuple[int, Any, Any, Sequence[Any]]] = []
        """Number of the time, start, end, and the starts and ends of waits between them, on a GPU."""
        if is_accelerator(device):
            self._stamp = traffic.stamp_stream = lambda: StreamEvent(device, timed=True)

    def _computing_nanoseconds(self) -> int:
        """Return the time of a clock that stands still in waits for communication."""
        return time.perf_counter_ns() - self._traffic.blocked_nanoseconds

    def bind(self, segments: Sequence[Segment], runs: Sequence[RunCalls]) -> Sequence[RunCalls]:
        """Return functions that run the segments as `runs` do, and measure those of actions."""
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
        """Call `step`, which runs the optimizer, and measure it."""
        self._measure(len(self.keys), step)

    def _measure(self, number: int, call: Callable[[], object]) -> None:
        waits = self._traffic.stream_waits
        before, start = len(waits), self._stamp()
        call()
        self._notes.append((number, start, self._stamp(), waits[before:]))

    def take(self) -> ReadTimes:
        """End the measurement of a step; return a function that returns its seconds.

        On a GPU it may be called once the step's work is done.
        """
        notes, self._notes = self._notes, []
        self._traffic.stream_waits.clear()

        def read() -> list[float]:
            seconds = [0.0] * (len(self.keys) + 1)
            for number, start, end, waits in notes:
                waited = sum(_seconds(*wait) for wait in waits)
                seconds[number] += max(0.0, _seconds(start, end) - waited)
            return seconds

        return read


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two stamps: nanoseconds, or events of a stream."""
    if isinstance(start, StreamEvent):
        return float(end.milliseconds_since(start)) / 1e3
    return float(end - start) / 1e9
