"""Shared-memory segments of the ranks of a group on one host, and staging buffers in them.

Each rank makes one segment and maps those of all others. To stage a tensor, a rank copies it to a free block
of its own segment and sends the offset; ranks that have received the offset may read the block until they
acknowledge. Then the block is free again: mostly a tensor of that size is staged where the last but one was,
which is still in the cache.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.peer_sockets import ChannelMessage

CAPACITY = 2**28
"""Bytes a rank for staged tensors; only used bytes take memory. At the limit, pending reads are finished."""
_SMALLEST_BLOCK = 2**12

Read = Callable[[Sequence[Tensor]], None]
"""Reads the staged tensors of all ranks, in order of the index and flat."""


class SharedSegments:
    """One shared-memory segment per rank, all of one size, filled with zeros. Only written pages take memory.

    The memory is freed when no rank has a tensor in it any more.
    """

    def __init__(self, channels: Channels, nbytes: int) -> None:
        """Make this rank's segment and send its descriptor to the others, without blocking."""
        self._channels = channels
        self._nbytes = nbytes
        self._segments: tuple[Tensor, ...] = ()
        self._sequence = channels.next_sequence()
        descriptor = os.memfd_create("plait")
        try:
            os.ftruncate(descriptor, nbytes)
            self.own = self._map(descriptor)
            channels.send(self._sequence, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def all_segments(self) -> tuple[Tensor, ...]:
        """Return the shared memory of all ranks, by index, as bytes; block until all have sent it."""
        if not self._segments:
            messages = self._channels.receive(self._sequence, ChannelMessage(self._nbytes))
            descriptors = (message.descriptor for message in messages)
            self._segments = tuple(
                self.own if one is None else self._map_and_close(one) for one in descriptors
            )
            self._channels.acknowledge(self._sequence)
        return self._segments

    def _map_and_close(self, descriptor: int) -> Tensor:
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int) -> Tensor:
        # By name, since torch then keeps no descriptor: a mapping of Python's would, one a tensor and rank.
        name = f"/proc/self/fd/{descriptor}"
        return torch.from_file(name, shared=True, size=self._nbytes, dtype=torch.uint8)


@dataclass(eq=False)
class PendingRead:
    """A started collective: `wait` blocks until all ranks' tensors are in shared memory, then reads them."""

    staging: SharedStagingBuffers
    sequences: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    read: Read | None
    """None once it was called, or is not to be."""

    def wait(self, awaited: str = "") -> None:
        """Block until all ranks' tensors are in shared memory, then read them once.

        Raises as `Channels.receive`.
        """
        if self.read is None:
            return
        self.staging.finish_before(self.sequences[0])
        segments = self.staging.segments.all_segments()
        messages = self.staging.channels.receive(self.sequences[0], ChannelMessage(self.offset))
        pairs = zip(segments, messages, strict=True)
        self.read([segment[message.value :][: self.nbytes].view(self.dtype) for segment, message in pairs])
        self.read = None
        self.staging.done(self.sequences)

    def abandon(self) -> bool:
        """Skip the read; return True, since this rank's tensors are not used any more."""
        if self.read is not None:
            self.read = None
            with suppress(OSError):  # after an error the channels are closed
                self.staging.done(self.sequences)
        return True


class SharedStagingBuffers:
    """Buffers in shared memory, one per rank of a group, into which ranks copy tensors for others."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.segments = SharedSegments(channels, CAPACITY)
        self._used = 0
        self._free: dict[int, list[int]] = {}
        self._lent: deque[tuple[int, int, int]] = deque()
        """Sequence number, size and offset of the blocks that others may still read."""
        self._pending: dict[int, PendingRead] = {}

    def stage(self, tensor: Tensor, read: Read, *, further: int = 0) -> PendingRead:
        """Copy `tensor` to shared memory for the others; `wait()` of the result calls `read`.

        All ranks call it with the same shape and dtype, of at most `CAPACITY` bytes. `further`: how many more
        sequence numbers `read` uses, which are acknowledged with the read.
        """
        offset, block = self._lend(tensor.nbytes)
        block.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return self._send(offset, further, tensor.dtype, tensor.nbytes, read)

    def stage_parts(self, parts: Sequence[Tensor], most: int, read: Read) -> PendingRead:
        """Copy flat tensors to shared memory, one after another; `read` gets `most` bytes per rank.

        `most` is the same on all ranks, at most `CAPACITY`; none has more bytes. Behind its own are others.
        """
        offset, block = self._lend(sum(part.nbytes for part in parts))
        first = 0
        for part in parts:
            block[first:][: part.nbytes].view(part.dtype).copy_(part.detach())
            first += part.nbytes
        return self._send(offset, 0, torch.uint8, most, read)

    def _lend(self, nbytes: int) -> tuple[int, Tensor]:
        """Reserve a block of this rank's segment; return its offset and the bytes to write."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        offset = self._free_block(size)
        self._lent.append((self.channels.next_sequence(), size, offset))
        return offset, self.segments.own[offset:][:nbytes]

    def _send(self, offset: int, further: int, dtype: torch.dtype, nbytes: int, read: Read) -> PendingRead:
        """Send other ranks the offset of the block that was reserved last; return the pending read."""
        sequence = self._lent[-1][0]
        sequences = (sequence, *(self.channels.next_sequence() for _ in range(further)))
        pending = PendingRead(self, sequences, offset, dtype, nbytes, read)
        self._pending[sequence] = pending
        self.channels.send(sequence, offset)
        return pending

    def finish_before(self, sequence: int) -> None:
        """Finish this rank's pending reads numbered before `sequence`, for which other ranks may wait."""
        for number, pending in list(self._pending.items()):
            if number < sequence:
                pending.wait()

    def done(self, sequences: tuple[int, ...]) -> None:
        """Tell other ranks that this one has read the tensors staged with these sequence numbers."""
        del self._pending[sequences[0]]
        self.channels.acknowledge(*sequences)

    def _free_block(self, size: int) -> int:
        while self._lent and self.channels.is_acknowledged(self._lent[0][0]):
            _, free_size, offset = self._lent.popleft()
            self._free.setdefault(free_size, []).append(offset)
        if free := self._free.get(size):
            return free.pop()
        if self._used + size > CAPACITY:
            self._clear()
        self._used += size
        return self._used - size

    def _clear(self) -> None:
        """Finish all pending reads and wait until all ranks have; then the whole segment can be reused."""
        for pending in list(self._pending.values()):
            pending.wait()
        self.segments.all_segments()  # not received yet where all reads were abandoned
        self.channels.send_acknowledgement()
        if self._lent:
            self.channels.wait_acknowledged(self._lent[-1][0])
        self._lent.clear()
        self._free.clear()
        self._used = 0
