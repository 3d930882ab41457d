"""Transport between processes of one host: tensors in shared memory, short messages over Unix sockets.

What shared memory does not pay for (large tensors, messages between two ranks) goes over torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.comm.transport.interface import Pending
from plait.comm.transport.reduction import Op
from plait.comm.transport.shared_memory import collectives
from plait.comm.transport.shared_memory.host import Host
from plait.comm.transport.shared_memory.lines import Lines
from plait.comm.transport.shared_memory.memory import SharedMemory
from plait.comm.transport.shared_memory.scratch import Scratch
from plait.comm.transport.torch_distributed import Algorithm, TorchTransport

WHOLE_LIMIT = 2**21
"""Bytes that all ranks together may show for each to reduce all itself; beyond, each reduces a piece."""
SHOW_LIMIT = 2**25
"""Bytes of a tensor that goes through the scratch: once or twice as much stays taken there on each rank."""


class SharedMemoryTransport(TorchTransport):
    """A process group whose ranks are all on one host. See `Transport`."""

    on_one_host = True

    def __init__(
        self, process_group: dist.ProcessGroup, index: int, host: Host, ranks: tuple[int, ...], timeout: float
    ) -> None:
        super().__init__(process_group, index)
        self._host, self._ranks, self._timeout = host, ranks, timeout
        self._others: MutableMapping[Tensor, tuple[Tensor, ...]] = WeakTensorKeyDictionary()
        """For tensors of `shared_zeros` those of the other ranks, in order of the index."""

    @cached_property
    def lines(self) -> Lines:
        """The channels to the other ranks. All ranks make them at the same operation; none waits."""
        label = self.process_group.group_name
        return self._host.lines(self._ranks, self.index, label, self._timeout)

    @cached_property
    def scratch(self) -> Scratch:
        """Where the ranks show each other tensors. As for `lines`."""
        return Scratch(self.lines)

    def over_torch(self) -> TorchTransport:
        """The same group without shared memory, as if its ranks were on several hosts."""
        return TorchTransport(self.process_group, self.index)

    def all_reduce_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return how an all-reduce is done, from what all ranks know alike: device, size, `shares`."""
        if self.shares(tensor):
            return "in place"
        if not _fits(tensor):
            return super().all_reduce_algorithm(tensor)
        return "whole" if tensor.nbytes * self.size <= WHOLE_LIMIT else "pieces"

    def reduce_scatter_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return how a reduce-scatter is done, from what all ranks know alike."""
        if self.shares(tensor):
            return "in place"
        return "whole" if _fits(tensor) else super().reduce_scatter_algorithm(tensor)

    def all_gather_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return how an all-gather is done, from what all ranks know alike."""
        return "whole" if _fits(tensor) else super().all_gather_algorithm(tensor)

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start an all-reduce in rank order, in shared memory; of large tensors by the backend."""
        algorithm = self.all_reduce_algorithm(tensor)
        if algorithm == "in place" and total.data_ptr() == tensor.data_ptr():
            return collectives.reduce_in_place(self._of_all_ranks(tensor), op, self.lines)
        if algorithm in ("exchange", "backend"):
            return super().all_reduce(tensor, total, op)
        reduction = collectives.reduce_whole if algorithm == "whole" else collectives.reduce_in_pieces
        return reduction(tensor, total, op, self.scratch)

    def reduce_scatter(self, tensor: Tensor, piece: Tensor, op: Op) -> Pending:
        """Start a reduce-scatter in rank order, in shared memory; of large tensors by messages."""
        algorithm = self.reduce_scatter_algorithm(tensor)
        if algorithm == "in place":
            return collectives.reduce_to_own_piece(self._of_all_ranks(tensor), piece, op, self.lines)
        if algorithm != "whole":
            return super().reduce_scatter(tensor, piece, op)
        return collectives.reduce_to_pieces(tensor, piece, op, self.scratch)

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather in shared memory; of large tensors by the backend."""
        if self.all_gather_algorithm(tensor) != "whole":
            return super().all_gather(tensor, whole)
        return collectives.gather_whole(tensor, whole, self.scratch)

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Each rank makes a file in memory and maps those of all ranks; under Linux alone."""
        memory = SharedMemory(self.lines, size * dtype.itemsize)
        others = [part.view(dtype) for part in memory.everyone()]
        mine = others.pop(self.index)
        self._others[mine] = tuple(others)  # without its own: a tensor must not hold itself alive
        return mine

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by `shared_zeros`."""
        return tensor in self._others

    def abort(self, cause: Exception) -> None:
        """Close the channels: the other ranks notice at once."""
        if "lines" in self.__dict__:
            self.lines.fail(cause)

    def _of_all_ranks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        others, index = self._others[tensor], self.index
        return (*others[:index], tensor, *others[index:])


def _fits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= SHOW_LIMIT
