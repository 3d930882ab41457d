"""The ranks' pieces of one dim of a tensor: a rank's own, all of them together, and its piece of their sum.

Pieces are cut as `divide` does, so the first ranks may hold one more. On the meta device nothing is
communicated, and what is started is done at once. What a collective gives here is no view: a layer may write
to it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from plait.comm.collectives import all_gather, reduce_scatter
from plait.comm.group import Group
from plait.errors import ModelError
from plait.layout import divide

PendingTensor = Callable[[], Tensor]
"""Waits for a collective that was started, and gives its result. To be called once."""


def own_piece(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece of `whole`, a view."""
    own = divide(whole.shape[dim], group.size)[group.index]
    return whole.narrow(dim, own.start, len(own))


def start_whole(piece: Tensor, group: Group, dim: int, size: int) -> PendingTensor:
    """Start to put the ranks' pieces of `dim` together, `size` in all.

    Communication: one all-gather, of pieces that are padded to the size of the largest. ModelError for what
    is no piece of that.
    """
    cuts, dim = divide(size, group.size), dim % piece.dim()
    own = cuts[group.index]
    if piece.is_meta and piece.shape[dim] == size > len(own):  # whole: the proof of rules will say so
        return lambda: piece.new_empty(*piece.shape[:dim], size, *piece.shape[dim + 1 :])
    if piece.shape[dim] != len(own):
        raise ModelError(
            f"a tensor of shape {list(piece.shape)} is gathered over {group.name}, whose ranks cut {size} "
            f"along dim {dim}, so that this one has {len(own)}: let layers with the rule sequence give as "
            "many positions as they get, or take that rule off them."
        )
    mine = _padded(piece, dim, len(cuts[0]))
    if len(cuts[-1]) == len(cuts[0]) and prod(piece.shape[:dim]) == 1:  # they land in place
        whole = mine.new_empty(*mine.shape[:dim], size, *mine.shape[dim + 1 :])
        landing = _gathering(mine, group, whole.view(_of_all(mine, group)))

        def land() -> Tensor:
            landing()
            return whole

        return land
    pending = _gathering(mine, group, mine.new_empty(_of_all(mine, group)))

    def finish() -> Tensor:
        pieces = zip(pending().chunk(group.size), cuts, strict=True)
        return torch.cat([one.narrow(dim, 0, len(cut)) for one, cut in pieces], dim)

    return finish


def start_piece_of_sum(summand: Tensor, group: Group, dim: int) -> PendingTensor:
    """Start to sum the ranks' tensors, of which each keeps its piece of `dim`.

    Communication: one reduce-scatter, of a tensor in which the pieces are padded to the size of the largest.
    """
    dim = dim % summand.dim()
    cuts = divide(summand.shape[dim], group.size)
    own = cuts[group.index]
    if len(cuts[-1]) == len(cuts[0]):
        shape = *summand.shape[:dim], group.size, len(own), *summand.shape[dim + 1 :]
        mine = summand.reshape(shape).movedim(dim, 0).flatten(0, 1).contiguous()
    else:
        each = (summand.narrow(dim, cut.start, len(cut)) for cut in cuts)
        mine = torch.cat([_padded(one, dim, len(cuts[0])) for one in each])
    pending = _summing(mine, group)
    if len(own) == len(cuts[0]):
        return pending
    return lambda: pending().narrow(dim, 0, len(own)).clone(memory_format=torch.contiguous_format)


def _gathering(mine: Tensor, group: Group, out: Tensor) -> PendingTensor:
    """An all-gather along dim 0."""
    return (lambda: out) if mine.is_meta else all_gather(mine, group, out=out, checked=False).wait


def _summing(mine: Tensor, group: Group) -> PendingTensor:
    """A reduce-scatter along dim 0."""
    if not mine.is_meta:
        return reduce_scatter(mine, group, checked=False).wait
    piece = mine.new_empty(mine.shape[0] // group.size, *mine.shape[1:])
    return lambda: piece


def _of_all(mine: Tensor, group: Group) -> tuple[int, ...]:
    """The shape of all ranks' tensors along dim 0."""
    return group.size * mine.shape[0], *mine.shape[1:]


def _padded(piece: Tensor, dim: int, size: int) -> Tensor:
    """`piece`, with zeros behind it along `dim` where that has fewer than `size`."""
    missing = size - piece.shape[dim]
    if not missing:
        return piece
    zeros = piece.new_zeros(*piece.shape[:dim], missing, *piece.shape[dim + 1 :])
    return torch.cat([piece, zeros], dim)
