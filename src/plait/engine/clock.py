"""Clocks that time actions: the host's clock, or events on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch


class HostClock:
    """The clock of the CPU, whose computations end before the call that started them returns."""

    def stamp(self) -> int:
        """Return the time in nanoseconds of `time.perf_counter_ns`."""
        return time.perf_counter_ns()

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Return the stamps unchanged."""
        return list(stamps)


class DeviceClock:
    """The clock of the current stream of a GPU.

    Making one synchronises with the device, and so does `read`; `stamp` does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._base = self.stamp()
        self._base.synchronize()
        self._origin = (before + time.perf_counter_ns()) // 2
        """When the base event was recorded, on the host's clock, to a few microseconds."""

    def stamp(self) -> torch.cuda.Event:
        """Return an event recorded after all work submitted to the stream so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Return the stamps as nanoseconds of the host's clock, with a resolution of half a microsecond."""
        torch.cuda.synchronize(self._device)
        return [self._origin + round(self._base.elapsed_time(event) * 1_000_000) for event in stamps]


Clock: TypeAlias = HostClock | DeviceClock


def clock_on(device: torch.device) -> Clock:
    """Start a clock for computations on `device`."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
