"""Tensors in shared memory of the ranks of one host, which are reduced in place.

Over Gloo the ranks of one host send through the loopback interface, which copies each byte several times and
takes processor time from the step itself. Every rank of a group maps the tensors that `shared_zeros` makes;
in `all_reduce` each rank then reduces its piece of all ranks' tensors, in rank order, and writes it back to
all of them, between two barriers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.comm.handle import Handle

SMALLEST = 2**18
"""Bytes below which a tensor is not shared: a copy costs little, and a mapping takes whole pages."""


def shared_zeros(size: int, dtype: torch.dtype, device: torch.device, group: Group | None) -> Tensor:
    """Return flat zeros `[size]`; in memory shared by the ranks of `group` where supported, if large.

    It is supported on the CPU under Linux, for ranks on one host. All ranks of the group call it in the same
    order with the same arguments; it blocks until all have. Communication: one message to each other rank,
    not counted as traffic. The storage of a shared tensor cannot be resized. Resident memory includes the
    pages of peers' tensors that a rank touches. Raises `CommunicationError` where a rank is gone or does not
    take part within the group's timeout.
    """
    nbytes = size * dtype.itemsize
    transport = None if group is None else group.transport
    if group is None or transport is None or device.type != "cpu" or nbytes < SMALLEST:
        return torch.zeros(size, dtype=dtype, device=device)
    awaited = f"shared memory over {group.name} with ranks {', '.join(map(str, group.ranks))}"
    made: list[Tensor | None] = []

    def start() -> None:
        made.append(transport.shared_zeros(size, dtype, awaited))

    shared = Handle(start, made.pop, awaited, group).wait()
    return torch.zeros(size, dtype=dtype, device=device) if shared is None else shared
