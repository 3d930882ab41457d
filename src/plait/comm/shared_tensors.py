"""Tensors that all ranks of a group on one host can reach: reduced where they lie, without messages.

Over Gloo the ranks of one host talk through the loopback interface, which copies each byte several times
and takes the processor's time from the step itself. A tensor made by `shared_zeros` lies in memory that every
rank of its group maps; `all_reduce` then has each rank reduce its piece of everyone's tensor, in rank order,
and write it back to everyone's. Two words a pair say when to begin and when all are done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.comm.handle import Handle

SMALLEST = 2**18
"""Bytes. Below, copying a tensor costs next to nothing, and a mapping of its own is a waste."""


def shared_zeros(size: int, dtype: torch.dtype, device: torch.device, group: Group | None) -> Tensor:
    """Zeros, flat `[size]`; in memory that every rank of `group` maps where that is possible and pays.

    All ranks of the group call it alike and in the same order; it waits for all. It is possible on the CPU
    under Linux, for ranks on one host. Communication: a word to each other rank, not counted as traffic. The
    tensor's storage cannot be resized. Resident memory counts what a rank touches of its peers' tensors as
    well. Raises `CommunicationError` where a rank is gone or does not come within the group's timeout.
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
