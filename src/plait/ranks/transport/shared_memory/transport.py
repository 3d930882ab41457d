"""Transport between processes of one host: tensors in shared memory, short messages over Unix sockets.

Large tensors and point-to-point messages, which shared memory does not speed up, go over torch.distributed.
Reductions are in rank order, the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.ranks.transport.call_description import dtype_name
from plait.ranks.transport.interface import Pending, RangeSizes
from plait.ranks.transport.rank_order_reduction import Op, blocks, fold
from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.host_discovery import HostRanks
from plait.ranks.transport.shared_memory.peer_sockets import MOST_CALL_BYTES, ChannelMessage
from plait.ranks.transport.shared_memory.shared_staging import (
    PendingRead,
    SharedSegments,
    SharedStagingBuffers,
)
from plait.ranks.transport.torch_distributed import REDUCTIONS, Algorithm, Collective, TorchTransport

WHOLE_LIMIT = 2**21
"""Bytes staged by all ranks together up to which each reduces all of them; beyond, each reduces a range."""
STAGING_LIMIT = 2**25
"""Bytes up to which a tensor is staged: each rank's staging buffer grows to once or twice as much."""


class BarrieredStep:
    """An operation that `wait` runs between two barriers; the constructor enters the first."""

    def __init__(self, channels: Channels, step: Callable[[], None]) -> None:
        self._channels = channels
        self._first, self._second = channels.next_sequence(), channels.next_sequence()
        self._step = step
        channels.send(self._first)

    def wait(self, awaited: str = "") -> None:
        """Pass the first barrier, run this rank's function, pass the second. Raises as `Channels.receive`."""
        self._channels.receive(self._first, ChannelMessage(0))
        self._step()
        self._channels.send(self._second)
        self._channels.receive(self._second, ChannelMessage(0))
        self._channels.acknowledge(self._first, self._second)

    def abandon(self) -> bool:
        """Skip the operation and return True; ranks that wait for this rank time out."""
        with suppress(OSError):  # after an error the channels are closed
            self._channels.acknowledge(self._first, self._second)
        return True


def all_reduce_whole(tensor: Tensor, total: Tensor, op: Op, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-reduce of `tensor` into contiguous `total`; every rank computes the whole result itself.

    Each rank reads each byte once and sends one message to each peer.
    """
    flat = total.view(-1)
    return staging.stage(tensor, lambda staged: fold(staged, op, flat))


def all_reduce_in_ranges(tensor: Tensor, total: Tensor, op: Op, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-reduce where each rank reduces one range and copies the other ranks' reduced ranges.

    Fewer sums than in `all_reduce_whole`, and two messages to each peer.
    """
    channels = staging.channels
    own, totals = channels.index, total.view(-1).tensor_split(channels.size)

    def read(staged: Sequence[Tensor]) -> None:
        ranges = [tensor.tensor_split(channels.size) for tensor in staged]
        fold([one[own] for one in ranges], op, totals[own])
        ranges[own][own].copy_(totals[own])
        _, reduced = pending.sequences
        channels.send(reduced)
        channels.receive(reduced, ChannelMessage(0))
        for index, one in enumerate(ranges):
            if index != own:
                totals[index].copy_(one[index])

    pending = staging.stage(tensor, read, further=1)
    return pending


def reduce_scatter_staged(
    tensor: Tensor, own_range: Tensor, op: Op, staging: SharedStagingBuffers
) -> PendingRead:
    """Start a reduce-scatter of `tensor` into the contiguous `own_range`, this rank's part of the result."""
    own, size, flat = staging.channels.index, staging.channels.size, own_range.view(-1)

    def read(staged: Sequence[Tensor]) -> None:
        fold([tensor.tensor_split(size)[own] for tensor in staged], op, flat)

    return staging.stage(tensor, read)


def all_gather_staged(tensor: Tensor, whole: Tensor, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-gather of `tensor`, which may be this rank's range of `whole`, into contiguous `whole`."""
    own, ranges = staging.channels.index, whole.view(-1).tensor_split(staging.channels.size)

    def read(staged: Sequence[Tensor]) -> None:
        for index, (target, source) in enumerate(zip(ranges, staged, strict=True)):
            if index != own:
                target.copy_(source)
        if ranges[own].data_ptr() != tensor.data_ptr():
            ranges[own].copy_(staged[own])

    return staging.stage(tensor, read)


def all_to_all_staged(tensor: Tensor, received: Tensor, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-to-all of equal ranges of `tensor` into the ranges of contiguous `received`."""
    own, size = staging.channels.index, staging.channels.size
    ranges = received.view(-1).tensor_split(size)

    def read(staged: Sequence[Tensor]) -> None:
        for target, source in zip(ranges, staged, strict=True):
            target.copy_(source.tensor_split(size)[own])

    return staging.stage(tensor, read)


def all_to_all_uneven_staged(
    tensor: Tensor, received: Tensor, sizes: RangeSizes, most: int, staging: SharedStagingBuffers
) -> PendingRead:
    """Start an all-to-all of unequal ranges of a flat tensor into those of flat `received`.

    Before the ranges, without that for itself, a rank stages where each of them begins. `most`: bytes, more
    than which no rank sends. What is sent is kept until the wait, as by backends, for which `plait.memory`
    counts it.
    """
    own, ranges = staging.channels.index, torch.split(received, [*sizes.received])
    parts = torch.split(tensor, [*sizes.sent])
    staged_sizes = [0 if index == own else size for index, size in enumerate(sizes.sent)]
    table = torch.tensor([*accumulate(staged_sizes, initial=0), 0][: len(staged_sizes) // 2 * 2 + 2])

    def read(staged: Sequence[Tensor]) -> None:
        ranges[own].copy_(parts[own])
        for index, (target, source) in enumerate(zip(ranges, staged, strict=True)):
            if index == own:
                continue
            first, stop = source[: table.nbytes].view(table.dtype)[own : own + 2].tolist()
            if stop - first != target.numel():
                sent = f"index {index} sends {stop - first} elements to index {own}"
                raise RuntimeError(f"{sent}, which expects {target.numel()}")
            if target.numel():
                values = source[table.nbytes :].view(target.dtype)
                target.copy_(values[first : first + target.numel()])

    before, after = sum(sizes.sent[:own]), sum(sizes.sent[: own + 1])
    others = [one for one in (tensor[:before], tensor[after:]) if len(one)]
    return staging.stage_parts((table, *others), table.nbytes + most, read)


def reduce_in_place(
    tensors: Sequence[Tensor], op: Op, channels: Channels, own_range: Tensor | None = None
) -> BarrieredStep:
    """Start the reduction of flat tensors in shared memory, one per rank; each rank reduces one range.

    It writes it to the contiguous `own_range`, which may be that range of its own tensor (a reduce-scatter);
    without one to that range of every rank's tensor (an all-reduce).
    """

    def reduce_range() -> None:
        ranges = [tensor.tensor_split(channels.size)[channels.index] for tensor in tensors]
        targets = ranges if own_range is None else [own_range.view(-1)]
        for block in blocks((*ranges, *targets)):
            total = torch.empty_like(block[0])
            fold(block[: len(ranges)], op, total)
            for target in block[len(ranges) :]:
                target.copy_(total)

    return BarrieredStep(channels, reduce_range)


class AnnouncedPending:
    """A started operation of Gloo or NCCL whose call is compared with those of the other ranks."""

    def __init__(self, channels: Channels, sequence: int, pending: Pending) -> None:
        self._channels, self._sequence, self._pending = channels, sequence, pending

    def wait(self, awaited: str = "") -> None:
        """Block until the operation is complete; raise if a rank has made another call instead."""
        self._channels.compare_announced(self._sequence)
        self._pending.wait(awaited)

    def abandon(self) -> bool:
        """Stop comparing calls, and abandon the operation; return whether tensors can be reused."""
        with suppress(OSError):  # after an error the channels are closed
            self._channels.withdraw(self._sequence)
        return self._pending.abandon()


class SharedMemoryTransport(TorchTransport):
    """`Transport` for ranks of one host: small CPU tensors by shared memory, others by torch.distributed."""

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
        """The channels to the other ranks, opened without blocking in the first operation that uses them."""
        label = self.process_group.group_name
        return self._host.channels(self._ranks, self.index, label, self._timeout)

    @cached_property
    def staging(self) -> SharedStagingBuffers:
        """The group's staging buffers, made without blocking in the first operation that uses them."""
        return SharedStagingBuffers(self.channels)

    def over_torch(self) -> TorchTransport:
        """Return a transport of the group that uses torch instead of shared memory."""
        return TorchTransport(self.process_group, self.index)

    def algorithm(self, collective: Collective, tensor: Tensor) -> Algorithm:
        """Return the algorithm of a collective; it depends on device, size and `shares(tensor)` only."""
        if collective in REDUCTIONS and self.shares(tensor):
            return "in place"
        if tensor.device.type != "cpu" or tensor.nbytes > STAGING_LIMIT:
            return super().algorithm(collective, tensor)
        large = tensor.nbytes * self.size > WHOLE_LIMIT
        return "ranges" if collective == "all_reduce" and large else "whole"

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start an all-reduce: in shared memory and rank order, or, for large tensors, by the backend."""
        self._call("all_reduce", tensor, op)
        algorithm = self.algorithm("all_reduce", tensor)
        if algorithm == "in place" and total.data_ptr() == tensor.data_ptr():
            return reduce_in_place(self._tensors_of_all_ranks(tensor), op, self.channels)
        if algorithm in ("exchange", "backend"):
            return self._announced(tensor, partial(super().all_reduce, tensor, total, op))
        reduction = all_reduce_whole if algorithm == "whole" else all_reduce_in_ranges
        return reduction(tensor, total, op, self.staging)

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Start a reduce over the process group (Gloo), not in shared memory."""
        self._call("reduce", tensor, op, f"to {destination}")
        return self._announced(tensor, partial(super().reduce, tensor, op, destination))

    def reduce_scatter(self, tensor: Tensor, own_range: Tensor, op: Op) -> Pending:
        """Start a reduce-scatter in rank order: in shared memory, or, for large tensors, by an all-to-all."""
        self._call("reduce_scatter", tensor, op)
        algorithm = self.algorithm("reduce_scatter", tensor)
        if algorithm == "in place":
            return reduce_in_place(self._tensors_of_all_ranks(tensor), op, self.channels, own_range)
        if algorithm != "whole":
            return self._announced(tensor, partial(super().reduce_scatter, tensor, own_range, op))
        return reduce_scatter_staged(tensor, own_range, op, self.staging)

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather: in shared memory, or, for large tensors, by the backend."""
        self._call("all_gather", tensor)
        if self.algorithm("all_gather", tensor) != "whole":
            return self._announced(tensor, partial(super().all_gather, tensor, whole))
        return all_gather_staged(tensor, whole, self.staging)

    def all_to_all(self, tensor: Tensor, received: Tensor, sizes: RangeSizes | None = None) -> Pending:
        """Start an all-to-all: in shared memory, or by the backend.

        By the backend where a tensor is large, or where it is not known how large it may be on other ranks.
        """
        if sizes is None:
            self._call("all_to_all", tensor)
        else:
            self._call("all_to_all in uneven ranges", None, dtype_name(tensor.dtype), sizes.most)
        if sizes is None and self.algorithm("all_to_all", tensor) == "whole":
            return all_to_all_staged(tensor, received, self.staging)
        most = None if sizes is None or sizes.most is None else sizes.most * tensor.itemsize
        if sizes is None or most is None or tensor.device.type != "cpu" or most > STAGING_LIMIT:
            return self._announced(tensor, partial(super().all_to_all, tensor, received, sizes))
        return all_to_all_uneven_staged(tensor, received, sizes, most, self.staging)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start a broadcast over the process group (Gloo), not in shared memory."""
        self._call("broadcast", tensor, f"from {source}")
        return self._announced(tensor, partial(super().broadcast, tensor, source))

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """Start a gather over the process group (Gloo), not in shared memory."""
        self._call("gather", tensor, f"to {destination}")
        return self._announced(tensor, partial(super().gather, tensor, whole, destination))

    def scatter(self, ranges: Tensor | None, own: Tensor, source: int) -> Pending:
        """Start a scatter over the process group (Gloo), not in shared memory."""
        self._call("scatter", own, f"from {source}")
        return self._announced(own, partial(super().scatter, ranges, own, source))

    def barrier(self) -> Pending:
        """Start a barrier of the process group (Gloo)."""
        self._call("barrier", None)
        return self._announced(None, super().barrier)

    def _call(self, kind: str, tensor: Tensor | None, *details: object) -> None:
        """Set the description of the call that the next messages to other ranks carry."""
        if tensor is None or tensor.device.type == "cpu":
            shape = None if tensor is None else (tensor.dtype, tensor.shape)
            self.channels.call = _described(kind, shape, details)

    def _announced(self, tensor: Tensor | None, start: Callable[[], Pending]) -> Pending:
        """Start an operation of the process group, and compare its description with the other ranks' calls.

        Where sizes differ a backend ends the process. On a GPU, whose waits do not block, none are compared.
        """
        if tensor is not None and tensor.device.type != "cpu":
            return start()
        return AnnouncedPending(self.channels, self.channels.announce(), start())

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Return zeros in a new shared-memory segment of this rank; map the other ranks' segments too."""
        self.channels.call = f"shared_zeros {dtype_name(dtype)}[{size}]".encode()
        segments = SharedSegments(self.channels, size * dtype.itemsize)
        others = [segment.view(dtype) for segment in segments.all_segments()]
        mine = others.pop(self.index)
        self._others[mine] = tuple(others)  # without its own: a tensor must not hold itself alive
        return mine

    def shares(self, tensor: Tensor) -> bool:
        """Return whether `tensor` was made by `shared_zeros`."""
        return tensor in self._others

    def abort(self, cause: Exception) -> None:
        """Close the channels to the other ranks, whose waits for this rank then fail at once."""
        if "channels" in self.__dict__:
            self.channels.fail(cause)

    def _tensors_of_all_ranks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        others, index = self._others[tensor], self.index
        return (*others[:index], tensor, *others[index:])


@lru_cache(1024)
def _described(kind: str, shape: tuple[torch.dtype, torch.Size] | None, details: tuple[object, ...]) -> bytes:
    """Return the description of a call, for the comparison between ranks."""
    words = [kind, *(str(one) for one in details if one is not None)]
    if shape is not None:
        words.append(f"of {dtype_name(shape[0])}{list(shape[1])}")
    return " ".join(words).encode()[:MOST_CALL_BYTES]
