"""Transport between processes of one host: tensors in shared memory, short messages over Unix sockets.

Large tensors and point-to-point messages, which shared memory does not speed up, go over torch.distributed.
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
from plait.comm.transport.shared_memory import algorithms
from plait.comm.transport.shared_memory.group_channels import Channels
from plait.comm.transport.shared_memory.host_discovery import HostRanks
from plait.comm.transport.shared_memory.shared_staging import SharedSegments, SharedStagingBuffers
from plait.comm.transport.torch_distributed import Algorithm, TorchTransport

WHOLE_LIMIT = 2**21
"""Bytes staged by all ranks together up to which each reduces all of them; beyond, each reduces a piece."""
STAGING_LIMIT = 2**25
"""Bytes up to which a tensor is staged: each rank's staging buffer grows to once or twice as much."""


class SharedMemoryTransport(TorchTransport):
    """The `Transport` of a process group whose ranks are all on one host."""

    on_one_host = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        index: int,
        host: HostRanks,
        ranks: tuple[int, ...],
        timeout: float,
    ) -> None:
        super().__init__(process_group, index)
        self._host, self._ranks, self._timeout = host, ranks, timeout
        self._others: MutableMapping[Tensor, tuple[Tensor, ...]] = WeakTensorKeyDictionary()
        """The other ranks' tensors for each tensor of `shared_zeros`, in order of the index."""

    @cached_property
    def channels(self) -> Channels:
        """The channels to the other ranks. All ranks open them at the same operation, without blocking."""
        label = self.process_group.group_name
        return self._host.channels(self._ranks, self.index, label, self._timeout)

    @cached_property
    def staging(self) -> SharedStagingBuffers:
        """The group's staging buffers. All ranks make them at the same operation, without blocking."""
        return SharedStagingBuffers(self.channels)

    def over_torch(self) -> TorchTransport:
        """Return a transport of the group that uses torch instead of shared memory."""
        return TorchTransport(self.process_group, self.index)

    def all_reduce_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return the algorithm of an all-reduce; depends on device, size and `shares(tensor)` only."""
        if self.shares(tensor):
            return "in place"
        if not _fits(tensor):
            return super().all_reduce_algorithm(tensor)
        return "whole" if tensor.nbytes * self.size <= WHOLE_LIMIT else "pieces"

    def reduce_scatter_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return the algorithm of a reduce-scatter; depends on device, size and `shares(tensor)` only."""
        if self.shares(tensor):
            return "in place"
        return "whole" if _fits(tensor) else super().reduce_scatter_algorithm(tensor)

    def all_gather_algorithm(self, tensor: Tensor) -> Algorithm:
        """Return the algorithm of an all-gather; it depends on device and size only."""
        return "whole" if _fits(tensor) else super().all_gather_algorithm(tensor)

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start an all-reduce: in rank order in shared memory, for large tensors by the backend."""
        algorithm = self.all_reduce_algorithm(tensor)
        if algorithm == "in place" and total.data_ptr() == tensor.data_ptr():
            return algorithms.all_reduce_in_place(self._tensors_of_all_ranks(tensor), op, self.channels)
        if algorithm in ("exchange", "backend"):
            return super().all_reduce(tensor, total, op)
        reduction = algorithms.all_reduce_whole if algorithm == "whole" else algorithms.all_reduce_in_pieces
        return reduction(tensor, total, op, self.staging)

    def reduce_scatter(self, tensor: Tensor, piece: Tensor, op: Op) -> Pending:
        """Start a reduce-scatter in rank order: in shared memory, for large tensors by an exchange."""
        algorithm = self.reduce_scatter_algorithm(tensor)
        if algorithm == "in place":
            return algorithms.reduce_scatter_in_place(
                self._tensors_of_all_ranks(tensor), piece, op, self.channels
            )
        if algorithm != "whole":
            return super().reduce_scatter(tensor, piece, op)
        return algorithms.reduce_scatter_staged(tensor, piece, op, self.staging)

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather: in shared memory, for large tensors by the backend."""
        if self.all_gather_algorithm(tensor) != "whole":
            return super().all_gather(tensor, whole)
        return algorithms.all_gather_staged(tensor, whole, self.staging)

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Make a shared-memory segment on each rank and map all of them; Linux only."""
        segments = SharedSegments(self.channels, size * dtype.itemsize)
        others = [segment.view(dtype) for segment in segments.all_segments()]
        mine = others.pop(self.index)
        self._others[mine] = tuple(others)  # without its own: a tensor must not hold itself alive
        return mine

    def shares(self, tensor: Tensor) -> bool:
        """Return whether `tensor` was made by `shared_zeros`."""
        return tensor in self._others

    def abort(self, cause: Exception) -> None:
        """Close the channels, which makes the other ranks fail at once."""
        if "channels" in self.__dict__:
            self.channels.fail(cause)

    def _tensors_of_all_ranks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        others, index = self._others[tensor], self.index
        return (*others[:index], tensor, *others[index:])


def _fits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= STAGING_LIMIT
