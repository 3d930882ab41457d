"""What actions are timed by: the host's clock, or events on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """A clock that was started when it was made."""

    def stamp(self) -> Any:
        """Note the time; cheap, and waits for nothing."""
        ...

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """What was noted, as nanoseconds of this host's `time.perf_counter_ns`."""
        ...


class HostClock:
    """For what is computed while the host waits for it."""

    def stamp(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """The stamps as they are."""
        return list(stamps)


class DeviceClock:
    """For what is computed on the current stream of a GPU, after the host has asked for it.

    Making one waits for all that the device has to do; `read` waits for the stamps. In between nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._base = self.stamp()
        self._base.synchronize()
        self._origin = (before + time.perf_counter_ns()) // 2
        """When the base was recorded, on the host's clock, to a few microseconds."""

    def stamp(self) -> torch.cuda.Event:
        """An event behind all that the stream has to do so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """As nanoseconds of the host's clock; events resolve about half a microsecond."""
        torch.cuda.synchronize(self._device)
        return [self._origin + round(self._base.elapsed_time(event) * 1_000_000) for event in stamps]


def clock_on(device: torch.device) -> Clock:
    """A clock for what is computed on `device`, started now."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
