"""`clock_offset`: the difference between the clocks of two hosts, measured by messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from plait.ranks.group import Group
from plait.ranks.point_to_point import receive, send

PINGS = 16
"""Exchanges with each rank; the fastest is used."""


class ClockOffset(NamedTuple):
    """The first rank's clock minus this rank's, in nanoseconds, and the largest possible error of it."""

    nanoseconds: int
    uncertainty: int
    """Largest possible error: half of the fastest round trip."""


def clock_offset(
    group: Group, device: torch.device, clock: Callable[[], int] = time.perf_counter_ns
) -> ClockOffset:
    """Return the first rank's `clock`, in nanoseconds, minus this rank's. All ranks of `group` call it.

    `device` is used for messages where Gloo is not available. Communication: none within one host, else
    `PINGS` messages of 8 bytes to the first rank and back, one rank after the other.
    """
    if group.on_one_host:
        return ClockOffset(0, 0)
    device = group.device_for_text(device)
    if group.index:
        return min((_ping(group, device, clock) for _ in range(PINGS)), key=lambda offset: offset.uncertainty)
    for other in range(1, group.size):
        for _ in range(PINGS):
            _answer(other, group, device, clock)
    return ClockOffset(0, 0)


def _ping(group: Group, device: torch.device, clock: Callable[[], int]) -> ClockOffset:
    """Return the clock offset from one ping, as if the first rank read its clock at half the round trip."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    before = clock()
    # The receive is posted after the send: NCCL carries out the messages of a pair in order.
    send(token, group, 0, label="a ping").wait()
    remote = int(receive(token, group, 0, label="the answer to a ping").wait())
    after = clock()
    return ClockOffset(remote - (before + after) // 2, (after - before + 1) // 2)


def _answer(other: int, group: Group, device: torch.device, clock: Callable[[], int]) -> None:
    token = torch.zeros(1, dtype=torch.int64, device=device)
    int(receive(token, group, other, label="a ping").wait())  # on a GPU, waits until it is received
    token.fill_(clock())
    send(token, group, other, label="the answer to a ping").wait()
