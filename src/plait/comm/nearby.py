"""Reductions among the ranks of one host: in shared memory, in rank order, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm import arithmetic
from plait.comm.arithmetic import Op
from plait.comm.group import Group
from plait.comm.host.line import Word
from plait.comm.host.lines import Lines
from plait.comm.host.scratch import Showing


class Meeting:
    """What each rank does when all have come, done when all have done it. It comes by making this."""

    def __init__(self, lines: Lines, between: Callable[[], None]) -> None:
        self._lines = lines
        self._coming, self._leaving = lines.ticket(), lines.ticket()
        self._between = between
        lines.say(self._coming)

    def wait(self) -> None:
        """Wait for the others, do this rank's part, wait for theirs. Raises as `Lines.hear`."""
        self._lines.hear(self._coming, Word(0))
        self._between()
        self._lines.say(self._leaving)
        self._lines.hear(self._leaving, Word(0))
        self._lines.finish(self._coming, self._leaving)

    def abandon(self) -> None:
        """Do nothing; ranks that wait for this one's part fail in time."""
        self._lines.finish(self._coming, self._leaving)


def reduce_whole(tensor: Tensor, total: Tensor, op: Op, group: Group) -> Showing:
    """Start an all-reduce of `tensor` into `total`, contiguous, where each rank reduces all of it.

    Each byte is read once a rank, and one word a pair is all that is said.
    """
    flat = total.view(-1)
    return group.scratch.show(tensor, lambda everyone: arithmetic.fold(everyone, op, flat))


def reduce_in_pieces(tensor: Tensor, total: Tensor, op: Op, group: Group) -> Showing:
    """As `reduce_whole`, but each rank reduces a piece and copies the others: less to add, a second word."""
    lines, scratch = group.lines, group.scratch
    totals = total.view(-1).tensor_split(group.size)
    reduced = lines.ticket()

    def use(everyone: Sequence[Tensor]) -> None:
        pieces = [shown.tensor_split(group.size) for shown in everyone]
        arithmetic.fold([piece[group.index] for piece in pieces], op, totals[group.index])
        pieces[group.index][group.index].copy_(totals[group.index])
        lines.say(reduced)
        lines.hear(reduced, Word(0))
        for index, piece in enumerate(pieces):
            if index != group.index:
                totals[index].copy_(piece[index])

    return scratch.show(tensor, use, reduced)


def reduce_to_pieces(tensor: Tensor, piece: Tensor, op: Op, group: Group) -> Showing:
    """Start a reduce-scatter of `tensor` into this rank's `piece`, contiguous."""
    flat = piece.view(-1)

    def use(everyone: Sequence[Tensor]) -> None:
        arithmetic.fold([shown.tensor_split(group.size)[group.index] for shown in everyone], op, flat)

    return group.scratch.show(tensor, use)


def gather_whole(tensor: Tensor, whole: Tensor, group: Group) -> Showing:
    """Start an all-gather of `tensor` into `whole`, contiguous, in which it may stand already."""
    pieces = whole.view(-1).tensor_split(group.size)

    def use(everyone: Sequence[Tensor]) -> None:
        for index, (piece, shown) in enumerate(zip(pieces, everyone, strict=True)):
            if index != group.index:
                piece.copy_(shown)
        if pieces[group.index].data_ptr() != tensor.data_ptr():
            pieces[group.index].copy_(everyone[group.index])

    return group.scratch.show(tensor, use)


def reduce_to_own_piece(everyone: Sequence[Tensor], piece: Tensor, op: Op, group: Group) -> Meeting:
    """Start a reduce-scatter of flat tensors that all ranks reach into this rank's `piece`, contiguous.

    `piece` may be this rank's piece of its own tensor, of which no other rank reads.
    """
    flat = piece.view(-1)

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(group.size)[group.index] for tensor in everyone]
        for *block, total in arithmetic.blocks((*pieces, flat)):
            summed = torch.empty_like(total)
            arithmetic.fold(block, op, summed)
            total.copy_(summed)

    return Meeting(group.lines, reduce_piece)


def reduce_in_place(everyone: Sequence[Tensor], op: Op, group: Group) -> Meeting:
    """Start an all-reduce of flat tensors that all ranks reach: each reduces a piece of all, for all."""

    def reduce_piece() -> None:
        pieces = [tensor.tensor_split(group.size)[group.index] for tensor in everyone]
        for block in arithmetic.blocks(pieces):
            total = torch.empty_like(block[0])
            arithmetic.fold(block, op, total)
            for piece in block:
                piece.copy_(total)

    return Meeting(group.lines, reduce_piece)
