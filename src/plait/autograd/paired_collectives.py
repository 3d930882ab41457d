"""Differentiable collectives in pairs: the forward of one is the backward of the other.

    forward                                   backward
    copy          nothing                     sum of the gradients          (all-reduce)
    reduce        sum of the pieces           nothing                       (all-reduce)
    gather        the pieces, concatenated    this rank's piece             (all-gather)
    split         this rank's piece           the gradients, concatenated   (all-gather)
    gather_in     the pieces, concatenated    this rank's piece of a sum    (all-gather, reduce-scatter)
    scatter_out   this rank's piece of a sum  the gradients, concatenated   (reduce-scatter, all-gather)

The names and the pairs are those of Megatron-LM's f and g (Shoeybi et al. 2019, section 3). Outside a pair of
`copy … reduce` or `split … gather` all ranks of the group hold the same tensor; inside, each holds its own.
Outside of `gather_in … scatter_out` each rank holds a piece, of the sequence say (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2); `to_pieces` and `to_whole` convert to such pieces and back, with the
collectives of `split` and `gather`. On the meta device, and in a group of one rank, nothing is communicated.

In a guarded group (see `Mesh`) the ranks first compare the input of `copy` and `split`, also where no
gradient is wanted: one more exchange of 256 bytes, forward, and a CommunicationError on every rank where bits
differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from plait.autograd.node_tags import tag, tag_of
from plait.autograd.regather import Gather, GatherRegistry
from plait.autograd.uneven_collectives import own_piece, start_piece_of_sum, start_whole
from plait.comm.collectives import all_reduce
from plait.comm.group import Group
from plait.comm.tensor_hash import require_same_bits
from plait.errors import ModelError

Overlap = Callable[[], None]
"""Runs in the backward during a reduction."""
PairedCollective = Literal[
    "copy", "reduce", "gather", "split", "gather_in", "scatter_out", "to_whole", "to_pieces"
]
_TAG = "plait.autograd.paired_collectives"
_ENTERS = "enter a region (mend what differs before it: random numbers, parameters that drifted apart) with"
"""The operation's name in the error of `require_same_bits`."""


def copy(tensor: Tensor, group: Group, overlap: Overlap | None = None) -> Tensor:
    """Return `tensor`; its gradient is summed over `group`.

    `overlap` runs during that sum. Communication: backward, one all-reduce.
    """
    require_same_bits(tensor, group, _ENTERS)
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _tagged("copy", _Copy.apply(tensor, group, overlap))  # type: ignore[no-untyped-call]


def reduce(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' tensors, in the memory of `tensor`. Communication: one all-reduce."""
    if group.size == 1:
        return tensor
    return _tagged("reduce", _Reduce.apply(tensor, group))  # type: ignore[no-untyped-call]


def gather(tensor: Tensor, group: Group, dim: int, size: int) -> Tensor:
    """Return the ranks' pieces of `dim` (see `plait.layout.divide`), concatenated to `size`.

    Communication: one all-gather, of pieces padded to the size of the largest.
    """
    if group.size == 1:
        return tensor
    return _tagged("gather", _Gather.apply(tensor, group, dim, size))  # type: ignore[no-untyped-call]


def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece of `dim` (see `plait.layout.divide`).

    Communication: backward, one all-gather.
    """
    require_same_bits(tensor, group, _ENTERS)
    if group.size == 1:
        return tensor
    return _tagged("split", _Split.apply(tensor, group, dim))  # type: ignore[no-untyped-call]


def gather_in(piece: Tensor, group: Group, dim: int, size: int, overlap: Overlap | None = None) -> Tensor:
    """Return the ranks' pieces of `dim`, concatenated to `size`; the gradient is reduce-scattered.

    `overlap` runs during the reduce-scatter. Communication: one all-gather; backward, one reduce-scatter.
    """
    if group.size == 1:
        return piece
    return _tagged("gather_in", _GatherIn.apply(piece, group, dim, size, overlap))  # type: ignore[no-untyped-call]


def scatter_out(tensor: Tensor, group: Group, dim: int, registry: GatherRegistry | None = None) -> Tensor:
    """Return this rank's piece of `dim` of the sum of the ranks' tensors.

    `registry` records the all-gather of the gradient, so that linears save only a piece of it.
    Communication: one reduce-scatter; backward, one all-gather.
    """
    if group.size == 1:
        return tensor
    return _tagged("scatter_out", _ScatterOut.apply(tensor, group, dim, registry))  # type: ignore[no-untyped-call]


def to_pieces(whole: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece of `dim`, like `split`; for sequence parallelism, outside of `tp` regions."""
    require_same_bits(whole, group, _ENTERS)
    if group.size == 1:
        return whole
    return _tagged("to_pieces", _Split.apply(whole, group, dim))  # type: ignore[no-untyped-call]


def to_whole(piece: Tensor, group: Group, dim: int, size: int) -> Tensor:
    """Return the ranks' pieces of `dim`, concatenated to `size`, like `gather`; inverse of `to_pieces`."""
    if group.size == 1:
        return piece
    return _tagged("to_whole", _Gather.apply(piece, group, dim, size))  # type: ignore[no-untyped-call]


def collective_of(node: Node) -> PairedCollective | None:
    """Return the paired collective that created a node of an autograd graph on the meta device, or None."""
    collective: PairedCollective | None = tag_of(node, _TAG)
    return collective


def _refuse_create_graph() -> None:
    # Gradients are enabled inside a backward only under create_graph.
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
        # Not in place: other nodes may share the gradient's memory.
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
        # Never a view: a piece may be written to, and should not keep the whole alive.
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
