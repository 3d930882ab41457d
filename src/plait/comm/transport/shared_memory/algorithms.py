"""All-reduce, reduce-scatter and all-gather in shared memory: in rank order, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from plait.comm.transport.reduction import Op, blocks, fold
from plait.comm.transport.shared_memory.channel import ChannelMessage
from plait.comm.transport.shared_memory.group_channels import Channels
from plait.comm.transport.shared_memory.shared_staging import PendingRead, SharedStagingBuffers


class BarrieredStep:
    """A pending step that each rank runs between two barriers. Its constructor enters the first barrier."""

    def __init__(self, channels: Channels, step: Callable[[], None]) -> None:
        self._channels = channels
        self._first, self._second = channels.next_sequence(), channels.next_sequence()
        self._step = step
        channels.send(self._first)

    def wait(self, awaited: str = "") -> None:
        """Pass the first barrier, run this rank's step, pass the second. Raises as `Channels.receive`."""
        self._channels.receive(self._first, ChannelMessage(0))
        self._step()
        self._channels.send(self._second)
        self._channels.receive(self._second, ChannelMessage(0))
        self._channels.acknowledge(self._first, self._second)

    def abandon(self) -> bool:
        """Skip the step and return True; ranks that wait for this one time out."""
        with suppress(OSError):  # after an error the channels are closed
            self._channels.acknowledge(self._first, self._second)
        return True


def all_reduce_whole(tensor: Tensor, total: Tensor, op: Op, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-reduce of `tensor` into `total`, contiguous, where each rank reduces all of it.

    Each rank reads each byte once and sends one message to each peer.
    """
    flat = total.view(-1)
    return staging.stage(tensor, lambda staged: fold(staged, op, flat))


def all_reduce_in_pieces(tensor: Tensor, total: Tensor, op: Op, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-reduce where each rank reduces one piece and copies the others: fewer sums, 2 messages."""
    channels = staging.channels
    own, totals = channels.index, total.view(-1).tensor_split(channels.size)
    reduced = channels.next_sequence()

    def read(staged: Sequence[Tensor]) -> None:
        pieces = [tensor.tensor_split(channels.size) for tensor in staged]
        fold([piece[own] for piece in pieces], op, totals[own])
        pieces[own][own].copy_(totals[own])
        channels.send(reduced)
        channels.receive(reduced, ChannelMessage(0))
        for index, piece in enumerate(pieces):
            if index != own:
                totals[index].copy_(piece[index])

    return staging.stage(tensor, read, reduced)


def reduce_scatter_staged(
    tensor: Tensor, piece: Tensor, op: Op, staging: SharedStagingBuffers
) -> PendingRead:
    """Start a reduce-scatter of `tensor` into this rank's `piece`, contiguous."""
    own, size, flat = staging.channels.index, staging.channels.size, piece.view(-1)

    def read(staged: Sequence[Tensor]) -> None:
        fold([tensor.tensor_split(size)[own] for tensor in staged], op, flat)

    return staging.stage(tensor, read)


def all_gather_staged(tensor: Tensor, whole: Tensor, staging: SharedStagingBuffers) -> PendingRead:
    """Start an all-gather of `tensor`, which may be this rank's piece of `whole`, into contiguous `whole`."""
    own, pieces = staging.channels.index, whole.view(-1).tensor_split(staging.channels.size)

    def read(staged: Sequence[Tensor]) -> None:
        for index, (piece, source) in enumerate(zip(pieces, staged, strict=True)):
            if index != own:
                piece.copy_(source)
        if pieces[own].data_ptr() != tensor.data_ptr():
            pieces[own].copy_(staged[own])

    return staging.stage(tensor, read)


def reduce_scatter_in_place(
    tensors: Sequence[Tensor], piece: Tensor, op: Op, channels: Channels
) -> BarrieredStep:
    """Start a reduce-scatter of flat tensors in shared memory, all ranks' in order, into this rank's `piece`.

    `piece`, contiguous, may be this rank's piece of its own tensor, which no other rank reads.
    """
    flat = piece.view(-1)

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(channels.size)[channels.index] for tensor in tensors]
        for *block, total in blocks((*pieces, flat)):
            summed = torch.empty_like(total)
            fold(block, op, summed)
            total.copy_(summed)

    return BarrieredStep(channels, reduce_piece)


def all_reduce_in_place(tensors: Sequence[Tensor], op: Op, channels: Channels) -> BarrieredStep:
    """Start an all-reduce of flat tensors in shared memory: each rank reduces one piece, for all ranks."""

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(channels.size)[channels.index] for tensor in tensors]
        for block in blocks(pieces):
            total = torch.empty_like(block[0])
            fold(block, op, total)
            for piece in block:
                piece.copy_(total)

    return BarrieredStep(channels, reduce_piece)
