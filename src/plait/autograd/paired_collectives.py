"""Differentiable collectives in pairs: what one does forward, its partner does backward.

    forward                                   backward
    copy          nothing                     sum of the gradients          (all-reduce)
    reduce        sum of the pieces           nothing                       (all-reduce)
    gather        pieces, one after another   this rank's piece             (all-gather)
    split         this rank's piece           gradients one after another   (all-gather)
    gather_in     pieces, one after another   this rank's piece of a sum    (all-gather, reduce-scatter)
    scatter_out   this rank's piece of a sum  gradients one after another   (reduce-scatter, all-gather)

The names and the pairs are those of Megatron-LM's f and g (Shoeybi et al. 2019, section 3). Outside a pair of
`copy … reduce` or `split … gather` all ranks of the group hold the same; inside, each holds its own. What
`gather_in … scatter_out` stand in is cut between the ranks, by sequence say (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2); `to_pieces` and `to_whole` lead there and back, and do what `split` and
`gather` do. On the meta device nothing is communicated; a group of one rank has nothing to do.

In a guarded group (see `Mesh`) the ranks first compare what enters such a pair, at `copy` and at `split`,
also where no gradient is wanted: one more exchange of 256 bytes, forward, and a CommunicationError on every
rank where one brings other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from plait.autograd.node_tags import tag, tag_of
from plait.autograd.piece_collectives import own_piece, start_piece_of_sum, start_whole
from plait.autograd.regather import Gather, GatherRegistry
from plait.comm.collectives import all_reduce
from plait.comm.group import Group
from plait.comm.tensor_hash import require_same_bits
from plait.errors import ModelError

Overlap = Callable[[], None]
"""What is done while a reduction is under way."""
PairedCollective = Literal[
    "copy", "reduce", "gather", "split", "gather_in", "scatter_out", "to_whole", "to_pieces"
]
_TAG = "plait.autograd.paired_collectives"
_ENTERS = "enter a region (mend what differs before it: random numbers, parameters that drifted apart) with"


def copy(tensor: Tensor, group: Group, overlap: Overlap | None = None) -> Tensor:
    """`tensor` as each rank's own: the same, and its gradient is summed over `group`.

    `overlap` runs in the backward while the sum is under way. Communication: backward, one all-reduce.
    """
    _require_whole(tensor, group)
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _tagged("copy", _Copy.apply(tensor, group, overlap))  # type: ignore[no-untyped-call]


def reduce(tensor: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, in the memory of `tensor`. Communication: one all-reduce of it."""
    if group.size == 1:
        return tensor
    return _tagged("reduce", _Reduce.apply(tensor, group))  # type: ignore[no-untyped-call]


def gather(tensor: Tensor, group: Group, dim: int, size: int) -> Tensor:
    """The ranks' pieces of `dim`, one after another: `size` in all, cut as `divide` does.

    Communication: one all-gather, of pieces that are padded to the size of the largest.
    """
    if group.size == 1:
        return tensor
    return _tagged("gather", _Gather.apply(tensor, group, dim, size))  # type: ignore[no-untyped-call]


def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece of `dim`, cut as `divide` does. Communication: backward, one all-gather."""
    _require_whole(tensor, group)
    if group.size == 1:
        return tensor
    return _tagged("split", _Split.apply(tensor, group, dim))  # type: ignore[no-untyped-call]


def gather_in(piece: Tensor, group: Group, dim: int, size: int, overlap: Overlap | None = None) -> Tensor:
    """The ranks' pieces of `dim` as each rank's own: `size` in all, and the gradient is summed and cut again.

    `overlap` runs in the backward while the sum is under way. Communication: one all-gather; backward, one
    reduce-scatter.
    """
    if group.size == 1:
        return piece
    return _tagged("gather_in", _GatherIn.apply(piece, group, dim, size, overlap))  # type: ignore[no-untyped-call]


def scatter_out(tensor: Tensor, group: Group, dim: int, registry: GatherRegistry | None = None) -> Tensor:
    """This rank's piece of `dim` of the sum of the ranks' tensors.

    `registry` are told of what the gradient was gathered, so that it need not be kept.
    Communication: one reduce-scatter; backward, one all-gather.
    """
    if group.size == 1:
        return tensor
    return _tagged("scatter_out", _ScatterOut.apply(tensor, group, dim, registry))  # type: ignore[no-untyped-call]


def to_pieces(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece of `dim`, for what works on pieces outside of regions. As `split`."""
    _require_whole(whole, group)
    if group.size == 1:
        return whole
    return _tagged("to_pieces", _Split.apply(whole, group, dim))  # type: ignore[no-untyped-call]


def to_whole(piece: Tensor, group: Group, dim: int, size: int) -> Tensor:
    """The ranks' pieces of `dim`, one after another, for what works on the whole. As `gather`."""
    if group.size == 1:
        return piece
    return _tagged("to_whole", _Gather.apply(piece, group, dim, size))  # type: ignore[no-untyped-call]


def collective_of(node: Node) -> PairedCollective | None:
    """Which of these functions made a node of an autograd graph on the meta device; None: none of them."""
    collective: PairedCollective | None = tag_of(node, _TAG)
    return collective


def _require_whole(tensor: Tensor, group: Group) -> None:
    """In a guarded group: what enters a region is the same on every rank."""
    require_same_bits(tensor, group, _ENTERS)


def _refuse_create_graph() -> None:
    # Gradients are enabled inside a backward only when it was asked to make a graph of itself.
    if torch.is_grad_enabled():
        raise ModelError(
            "a tensor-parallel layer met a backward with create_graph: its collectives have no second "
            "derivative, so take first-order gradients only."
        )


def _tagged(collective: PairedCollective, result: Tensor) -> Tensor:
    return tag(result, _TAG, collective)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, overlap: Overlap | None) -> Tensor:
        ctx.group, ctx.overlap = group, overlap
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_create_graph()
        if gradient.is_meta:
            return gradient, None, None
        # Not in place: autograd may have given the same memory to others.
        pending = all_reduce(gradient, ctx.group, out=torch.empty_like(gradient), checked=False)
        if ctx.overlap is not None:
            ctx.overlap()
        return pending.wait(), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor if tensor.is_meta else all_reduce(tensor, group, checked=False).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _refuse_create_graph()
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_whole(tensor, group, dim, size)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_create_graph()
        piece = own_piece(gradient, ctx.group, ctx.dim)
        return piece.clone(memory_format=torch.contiguous_format), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, tensor.shape[dim]
        # Never a view: a piece may be written to, and should not keep the whole.
        return own_piece(tensor, group, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_create_graph()
        return start_whole(gradient, ctx.group, ctx.dim, ctx.size)(), None, None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Tensor, group: Group, dim: int, size: int, overlap: Overlap | None
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.overlap = group, dim, overlap
        return start_whole(piece, group, dim, size)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        _refuse_create_graph()
        pending = start_piece_of_sum(gradient, ctx.group, ctx.dim)
        if ctx.overlap is not None and not gradient.is_meta:
            ctx.overlap()
        return pending(), None, None, None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int, registry: GatherRegistry | None) -> Tensor:
        ctx.gather, ctx.registry = Gather(group, dim, tensor.shape[dim]), registry
        return start_piece_of_sum(tensor, group, dim)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_create_graph()
        whole = ctx.gather.start(gradient)()
        if ctx.registry is not None:
            ctx.registry.add(whole, gradient, ctx.gather)
        return whole, None, None, None
