"""Point-to-point messages between two ranks of a group, and by them the offsets between the clocks of hosts.

A send is a rendezvous: it completes when the other rank has posted its receive, so post receives early, in
the order of the program. Messages of one pair arrive in the order in which they were sent, per tag on Gloo
(NCCL has no tags). Shapes and dtypes are not checked: Gloo ends the process if a message is longer than the
buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.transport.buffers import copy_out, output_buffer
from plait.ranks.transport.interface import Transport


def send(tensor: Tensor, group: Group, destination: int, *, label: str = "", tag: int = 0) -> Handle[None]:
    """Start a send to the rank with index `destination`; do not write to `tensor` before the wait returns.

    `label` names the message in errors, e.g. `"1F3"`. Any shape, dtype and strides. Traffic: its bytes.
    Raises `CommunicationError` for an index that is no other rank; the wait raises failures of the operation.
    """
    peer, transport = _peer(destination, group, "send to")
    group.traffic.record(group.name, "send", tensor.nbytes)
    awaited = f"{label or 'its message'} to reach rank {peer} over {group.name}"
    return Handle(
        partial(transport.send, tensor, destination, tag, label), lambda: None, awaited, group, peer
    )


def receive(buffer: Tensor, group: Group, source: int, *, label: str = "", tag: int = 0) -> Handle[Tensor]:
    """Post a receive into `buffer` from the rank with index `source`; the handle returns `buffer`.

    Shape and dtype are the sender's; strides may differ. Other arguments and errors as for `send`.
    """
    peer, transport = _peer(source, group, "receive from")
    received = output_buffer(buffer, buffer.shape, buffer)
    group.traffic.record(group.name, "receive", buffer.nbytes)
    awaited = f"{label or 'a message'} from rank {peer} over {group.name}"
    start = partial(transport.receive, received, source, tag, label)
    return Handle(start, lambda: copy_out(received, buffer), awaited, group, peer)


def _peer(index: int, group: Group, what: str) -> tuple[int, Transport]:
    """Return the global rank at `index`, and the group's transport. Raises unless that is another rank."""
    if not 0 <= index < group.size or index == group.index:
        raise CommunicationError(
            f"rank {group.rank} cannot {what} index {index} of {group.name}: the group has indices 0 to "
            f"{group.size - 1} and this rank is {group.index}, give another one of them."
        )
    assert group.transport is not None, "a group of several ranks is connected"
    return group.ranks[index], group.transport


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
