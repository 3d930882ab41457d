"""The ranks' pieces of one dim of a tensor: a rank's own, all of them together, and its piece of their sum.

Pieces are cut as `divide` does, so the first ranks may hold one more. On the meta device nothing is
communicated, and what is started is done at once.

What comes of a collective is no view, for autograd: it may be written to, as the output of any operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.collectives import all_gather, reduce_scatter
from plait.comm.group import Group
from plait.layout import divide

UnderWay = Callable[[], Tensor]
"""Waits for a collective that was started, and gives its result. To be called once."""


@dataclass
class Length:
    """How long the sequence is of which layers see a piece, in the micro-batch that runs now."""

    whole: int = 0


def own_piece(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece of `whole`, a view."""
    own = divide(whole.shape[dim], group.size)[group.index]
    return whole.narrow(dim, own.start, len(own))


def start_whole(piece: Tensor, group: Group, dim: int, size: int) -> UnderWay:
    """Start to put the ranks' pieces of `dim` together, `size` in all.

    Communication: one all-gather, of pieces that are padded to the size of the largest.
    """
    cuts = divide(size, group.size)
    if piece.is_meta:
        whole = piece.new_empty(_resized(piece, dim, size))
        return lambda: whole
    front = piece.movedim(dim, 0)
    if len(front) < len(cuts[0]):
        front = torch.cat([front, front.new_zeros(len(cuts[0]) - len(front), *front.shape[1:])])
    under_way = all_gather(front, group, checked=False)

    def finish() -> Tensor:
        whole = under_way.wait()
        if len(whole) > size:
            pieces = whole.view(group.size, *front.shape)
            whole = torch.cat([one[: len(cut)] for one, cut in zip(pieces, cuts, strict=True)])
        return whole.movedim(0, dim).contiguous().detach()

    return finish


def start_piece_of_sum(summand: Tensor, group: Group, dim: int) -> UnderWay:
    """Start to sum the ranks' tensors, of which each keeps its piece of `dim`.

    Communication: one reduce-scatter, of a tensor in which the pieces are padded to the size of the largest.
    """
    cuts = divide(summand.shape[dim], group.size)
    own = cuts[group.index]
    if summand.is_meta:
        piece = summand.new_empty(_resized(summand, dim, len(own)))
        return lambda: piece
    front = summand.movedim(dim, 0)
    if len(cuts[-1]) < len(cuts[0]):
        padded = front.new_zeros(group.size, len(cuts[0]), *front.shape[1:])
        for place, cut in zip(padded, cuts, strict=True):
            place[: len(cut)] = front[cut.start : cut.stop]
        front = padded.flatten(0, 1)
    under_way = reduce_scatter(front.contiguous(), group, checked=False)
    return lambda: under_way.wait()[: len(own)].movedim(0, dim).contiguous().detach()


def _resized(tensor: Tensor, dim: int, size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = size
    return shape
