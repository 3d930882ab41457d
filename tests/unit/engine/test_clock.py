"""Clocks. That of a GPU with events that are counted, for want of one."""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from plait.engine.step_recorder import DeviceClock, HostClock, clock_on

CUDA = torch.device("cuda", 0)


class Device:
    """A stream that is worked off 3.5 ms later than it is asked for; every use of it is written down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.time = -1.0

            def record(self, stream: object) -> None:
                assert stream == "the current stream"
                device.asked += 1
                device.calls.append("record")
                self.time = 3.5 * device.asked

            def synchronize(self) -> None:
                device.calls.append("wait for an event")

            def elapsed_time(self, other: Event) -> float:
                assert "wait for all" in device.calls[-1:], "the event may not have come yet"
                return other.time - self.time

        self.event = Event

    def synchronize(self, device: object) -> None:
        assert device == CUDA
        self.calls.append("wait for all")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return fake


def test_a_device_clock_synchronizes_only_at_the_start_and_when_read(device: Device) -> None:
    with patch("time.perf_counter_ns", side_effect=[1_000_000_000, 1_000_000_010]):
        clock = DeviceClock(CUDA)
    assert device.calls == ["wait for all", "record", "wait for an event"]
    stamps = [clock.stamp() for _ in range(3)]
    assert device.calls[3:] == ["record"] * 3
    milliseconds = 1_000_000
    times = clock.read(stamps)
    assert times == [1_000_000_005 + round(after * milliseconds) for after in (3.5, 7.0, 10.5)]
    assert device.calls[6:] == ["wait for all"]


def test_host_clock_stamps_are_perf_counter_times_in_order() -> None:
    clock = HostClock()
    before = time.perf_counter_ns()
    stamps = [clock.stamp(), clock.stamp()]
    after = time.perf_counter_ns()
    assert [before, *clock.read(stamps), after] == sorted([before, *stamps, after])


def test_a_cpu_is_timed_by_a_host_clock_and_a_gpu_by_a_device_clock(device: Device) -> None:
    assert isinstance(clock_on(torch.device("cpu")), HostClock)
    assert isinstance(clock_on(CUDA), DeviceClock)
