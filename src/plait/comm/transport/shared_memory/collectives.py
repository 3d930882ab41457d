"""Reductions among the ranks of one host: in shared memory, in rank order, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from plait.comm.transport.reduction import Op, blocks, fold
from plait.comm.transport.shared_memory.line import Word
from plait.comm.transport.shared_memory.lines import Lines
from plait.comm.transport.shared_memory.scratch import Scratch, Showing


class Meeting:
    """What each rank does when all have come, done when all have done it. It comes by making this."""

    def __init__(self, lines: Lines, between: Callable[[], None]) -> None:
        self._lines = lines
        self._coming, self._leaving = lines.ticket(), lines.ticket()
        self._between = between
        lines.say(self._coming)

    def wait(self, awaited: str = "") -> None:
        """Wait for the others, do this rank's part, wait for theirs. Raises as `Lines.hear`."""
        self._lines.hear(self._coming, Word(0))
        self._between()
        self._lines.say(self._leaving)
        self._lines.hear(self._leaving, Word(0))
        self._lines.finish(self._coming, self._leaving)

    def abandon(self) -> bool:
        """True: do nothing; ranks that wait for this one's part fail in time."""
        with suppress(OSError):  # after an error the channels are closed
            self._lines.finish(self._coming, self._leaving)
        return True


def reduce_whole(tensor: Tensor, total: Tensor, op: Op, scratch: Scratch) -> Showing:
    """Start an all-reduce of `tensor` into `total`, contiguous, where each rank reduces all of it.

    Each byte is read once a rank, and one word a pair is all that is said.
    """
    flat = total.view(-1)
    return scratch.show(tensor, lambda everyone: fold(everyone, op, flat))


def reduce_in_pieces(tensor: Tensor, total: Tensor, op: Op, scratch: Scratch) -> Showing:
    """As `reduce_whole`, but each rank reduces a piece and copies the others: less to add, a second word."""
    lines = scratch.lines
    own, totals = lines.index, total.view(-1).tensor_split(lines.size)
    reduced = lines.ticket()

    def use(everyone: Sequence[Tensor]) -> None:
        pieces = [shown.tensor_split(lines.size) for shown in everyone]
        fold([piece[own] for piece in pieces], op, totals[own])
        pieces[own][own].copy_(totals[own])
        lines.say(reduced)
        lines.hear(reduced, Word(0))
        for index, piece in enumerate(pieces):
            if index != own:
                totals[index].copy_(piece[index])

    return scratch.show(tensor, use, reduced)


def reduce_to_pieces(tensor: Tensor, piece: Tensor, op: Op, scratch: Scratch) -> Showing:
    """Start a reduce-scatter of `tensor` into this rank's `piece`, contiguous."""
    own, size, flat = scratch.lines.index, scratch.lines.size, piece.view(-1)

    def use(everyone: Sequence[Tensor]) -> None:
        fold([shown.tensor_split(size)[own] for shown in everyone], op, flat)

    return scratch.show(tensor, use)


def gather_whole(tensor: Tensor, whole: Tensor, scratch: Scratch) -> Showing:
    """Start an all-gather of `tensor` into `whole`, contiguous, in which it may stand already."""
    own, pieces = scratch.lines.index, whole.view(-1).tensor_split(scratch.lines.size)

    def use(everyone: Sequence[Tensor]) -> None:
        for index, (piece, shown) in enumerate(zip(pieces, everyone, strict=True)):
            if index != own:
                piece.copy_(shown)
        if pieces[own].data_ptr() != tensor.data_ptr():
            pieces[own].copy_(everyone[own])

    return scratch.show(tensor, use)


def reduce_to_own_piece(everyone: Sequence[Tensor], piece: Tensor, op: Op, lines: Lines) -> Meeting:
    """Start a reduce-scatter of flat tensors that all ranks reach into this rank's `piece`, contiguous.

    `piece` may be this rank's piece of its own tensor, of which no other rank reads.
    """
    flat = piece.view(-1)

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(lines.size)[lines.index] for tensor in everyone]
        for *block, total in blocks((*pieces, flat)):
            summed = torch.empty_like(total)
            fold(block, op, summed)
            total.copy_(summed)

    return Meeting(lines, reduce_piece)


def reduce_in_place(everyone: Sequence[Tensor], op: Op, lines: Lines) -> Meeting:
    """Start an all-reduce of flat tensors that all ranks reach: each reduces a piece of all, for all."""

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(lines.size)[lines.index] for tensor in everyone]
        for block in blocks(pieces):
            total = torch.empty_like(block[0])
            fold(block, op, total)
            for piece in block:
                piece.copy_(total)

    return Meeting(lines, reduce_piece)
