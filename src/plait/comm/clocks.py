"""Clocks of ranks, compared: on one host all processes read the same, between hosts an exchange tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from plait.comm.group import Group
from plait.comm.point_to_point import receive, send

PINGS = 16
"""Exchanges with each rank; the quickest counts."""

Clock = Callable[[], int]
"""Nanoseconds since any time."""


class ClockOffset(NamedTuple):
    """What to add to this rank's clock to get that of the first rank of a group, in nanoseconds."""

    nanoseconds: int
    uncertainty: int
    """It is wrong by at most so many: half of the quickest round trip."""


def clock_offset(group: Group, device: torch.device) -> ClockOffset:
    """The offset of this rank's `time.perf_counter_ns`. All ranks of `group` call it.

    `device` is where tensors travel if Gloo is not there. Communication: none within one host, else `PINGS`
    messages of 8 bytes to the first rank and back, one rank after the other.
    """
    if group.on_one_host:
        return ClockOffset(0, 0)
    return compare_clocks(group, group.device_for_text(device), time.perf_counter_ns)


def compare_clocks(group: Group, device: torch.device, clock: Clock) -> ClockOffset:
    """As `clock_offset`, by messages, for any clock."""
    if group.index:
        return min((_ask(group, device, clock) for _ in range(PINGS)), key=lambda offset: offset.uncertainty)
    for other in range(1, group.size):
        for _ in range(PINGS):
            _answer(other, group, device, clock)
    return ClockOffset(0, 0)


def _ask(group: Group, device: torch.device, clock: Clock) -> ClockOffset:
    """The first rank looks at its clock between the two times: taken to be in the middle."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    before = clock()
    # The receive is posted after the send: NCCL carries out the messages of a pair in order.
    send(token, group, 0, label="a ping").wait()
    there = int(receive(token, group, 0, label="the answer to a ping").wait())
    after = clock()
    return ClockOffset(there - (before + after) // 2, (after - before + 1) // 2)


def _answer(other: int, group: Group, device: torch.device, clock: Clock) -> None:
    token = torch.zeros(1, dtype=torch.int64, device=device)
    int(receive(token, group, other, label="a ping").wait())  # on a GPU, until it is really there
    token.fill_(clock())
    send(token, group, other, label="the answer to a ping").wait()
