"""Differentiable collectives in pairs: the forward of one is the backward of the other.

    forward                                   backward
    copy          nothing                     sum of the gradients          (all-reduce)
    reduce        sum of the parts            nothing                       (all-reduce)
    gather        the parts, concatenated     this rank's part              (all-gather)
    split         this rank's part            the gradients, concatenated   (all-gather)
    gather_in     the parts, concatenated     this rank's part of a sum     (all-gather, reduce-scatter)
    scatter_out   this rank's part of a sum   the gradients, concatenated   (reduce-scatter, all-gather)

The names and the pairs are those of Megatron-LM's f and g (Shoeybi et al. 2019, section 3). Outside a pair of
`copy … reduce` or `split … gather` all ranks of the group hold the same tensor; inside, each holds its own.
Outside of `gather_in … scatter_out` each rank holds a part, of the sequence say (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2); `to_parts` and `to_whole` convert to such parts and back, with the
collectives of `split` and `gather`. On the meta device, and in a group of one rank, nothing is communicated.

In a guarded group (see `Mesh`) the ranks first compare the input of `copy` and `split`, also where no
gradient is wanted: one more exchange of 256 bytes, forward, and a CommunicationError on every rank where bits
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from plait.errors import ModelError
from plait.plan.layout.layout import divide
from plait.ranks.collectives import all_reduce
from plait.ranks.consistency_check import require_same_bits
from plait.ranks.group import Group
from plait.tensor.autograd.eager_operations import TRACE, Operation, RecordedPair
from plait.tensor.autograd.float8_inputs import (
    CastInputs,
    InputGradient,
    InputParts,
    carrier_like,
    carrier_of,
    sum_of_gradients,
)
from plait.tensor.autograd.node_tags import tag, tag_of
from plait.tensor.autograd.regathered_activations import (
    Gather,
    GatherRegistry,
    own_range,
    start_reduce_scatter,
)

Overlap = Callable[[], None]
"""Runs in the backward during a reduction."""
PairedCollective = Literal[
    "copy", "reduce", "gather", "split", "gather_in", "scatter_out", "to_whole", "to_parts"
]
_TAG = "plait.tensor.autograd.paired_collectives"
_ENTERS = "enter a region (mend what differs before it: random numbers, parameters that drifted apart) with"
"""The operation's name in the error of `require_same_bits`."""


def copy(
    tensor: Tensor, group: Group, overlap: Overlap | None = None, inputs: CastInputs | None = None
) -> Tensor:
    """Return `tensor` unchanged; in the backward its gradient is all-reduced over `group`.

    `overlap` runs during that sum. `inputs` registers a carrier of the result, by which float8 linears give
    gradients in a wide dtype: the sum is then in that dtype. Communication: backward, one all-reduce.
    """
    backward = partial(_sum, group, overlap)
    if TRACE.get() is not None:
        forward = partial(_compared, group) if group.guarded else None
        return _paired("copy", tensor, group, forward, backward, inputs=inputs)
    require_same_bits(tensor, group, _ENTERS)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _paired("copy", tensor, group, None, backward, inputs=inputs)


def reduce(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' tensors, written to `tensor`. Communication: one all-reduce."""
    return _paired("reduce", tensor, group, partial(_sum_in_place, group), None, writes=True)


def gather(
    tensor: Tensor, group: Group, dim: int, size: int, collective: PairedCollective = "gather"
) -> Tensor:
    """Return the ranks' parts (ranges along `dim`) concatenated to `size`; the backward takes the own part.

    Communication: one all-gather, of parts padded to the size of the largest.
    """
    part = partial(_part, group, dim)
    return _paired(collective, tensor, group, Gather(group, dim, size).whole, part, dim, size)


def split(tensor: Tensor, group: Group, dim: int, collective: PairedCollective = "split") -> Tensor:
    """Return this rank's part (range along `dim`) of `tensor`; the backward gathers the gradient.

    Communication: backward, one all-gather.
    """
    whole, part = Gather(group, dim, tensor.shape[dim]).whole, partial(_compared_part, group, dim)
    return _paired(collective, tensor, group, part, whole, dim, _own_size(tensor, group, dim))


def gather_in(
    part: Tensor,
    group: Group,
    dim: int,
    size: int,
    overlap: Overlap | None = None,
    registry: GatherRegistry | None = None,
    inputs: CastInputs | None = None,
) -> Tensor:
    """Return the ranks' parts concatenated along `dim` to `size`; the gradient is reduce-scattered.

    `overlap` runs during the reduce-scatter. `registry` records the all-gather, so that linears save only
    the part. `inputs`: as for `copy`; where only float8 linears read the result, it has no memory, but NaN
    as each element, and they gather the part in eight bits. Communication: one all-gather; backward, one
    reduce-scatter.
    """
    gather, reduce_scattered = Gather(group, dim, size), partial(_reduce_scattered, group, dim, overlap)
    again = None if registry is None else gather
    if inputs is not None and inputs.take_region() and group.size > 1:
        return _entered_in_float8(part, gather, reduce_scattered, inputs, regathers=registry is not None)
    result = _paired(
        "gather_in", part, group, gather.whole, reduce_scattered, dim, size, regather=again, inputs=inputs
    )
    if registry is not None and result is not part and TRACE.get() is None:
        registry.add(result, part, gather)
    return result


def _entered_in_float8(
    part: Tensor, gather: Gather, backward: Operation, inputs: CastInputs, *, regathers: bool
) -> Tensor:
    """Return the input of a region that float8 linears gather in eight bits: a tensor without memory."""
    trace, gradient = TRACE.get(), InputGradient()
    carrier, shape = None, gather.whole_shape(part)
    if trace is None:
        parts = InputParts(part.detach(), gather, gather.start, saves_part=regathers)
        if torch.is_grad_enabled():
            carrier = carrier_of(part, gradient, shape, backward)
    else:
        parts = InputParts(
            part.detach(),
            gather,
            lambda given: partial(trace.gathered, gather, given, regathers=regathers),
            saves_part=False,
            trace_regathers=regathers,
        )
        carrier = trace.carrier_of(part, shape, backward)
    without_memory = part.detach().new_full([1] * part.dim(), torch.nan).expand(shape)
    inputs.enter(without_memory, carrier, gradient, parts)
    return without_memory


def scatter_out(tensor: Tensor, group: Group, dim: int, registry: GatherRegistry | None = None) -> Tensor:
    """Sum the ranks' tensors, and return this rank's part of the sum along `dim`.

    `registry` records the all-gather of the gradient, so that linears save only a part of it.
    Communication: one reduce-scatter; backward, one all-gather.
    """
    whole = partial(_registered_whole, Gather(group, dim, tensor.shape[dim]), registry)
    reduce_scattered = partial(_reduce_scattered, group, dim, None)
    return _paired("scatter_out", tensor, group, reduce_scattered, whole, dim, _own_size(tensor, group, dim))


@dataclass(frozen=True)
class SumOfSummands:
    """How the ranks' summands become a sum, or each rank's part of it along `dim`, outside of autograd."""

    group: Group
    dim: int | None
    size: int
    """That of the sum along `dim`."""
    registry: GatherRegistry | None = None
    """Records the all-gather of the gradient, so that linears save only a part of it."""

    @property
    def is_in_parts(self) -> bool:
        """Whether each rank gets a part of the sum."""
        return self.dim is not None and self.group.size > 1

    def total(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, written to `summand`, or this rank's part of it.

        Communication: one all-reduce, or one reduce-scatter.
        """
        if self.dim is None:
            return _sum_in_place(self.group, summand)
        return _reduce_scattered(self.group, self.dim, None, summand)

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of each summand, given the gradient of the result of `total`.

        Communication: none, or one all-gather.
        """
        if self.dim is None:
            return gradient
        return _registered_whole(Gather(self.group, self.dim, self.size), self.registry, gradient)

    def shape(self, summand: Sequence[int]) -> list[int]:
        """Return the shape of the result of `total`, for summands of the shape `summand`."""
        shape = list(summand)
        if self.dim is not None:
            shape[self.dim] = len(divide(shape[self.dim], self.group.size)[self.group.index])
        return shape


def to_parts(whole: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's range along `dim` of an activation that all ranks of `tp` have whole."""
    return split(whole, group, dim, "to_parts")


def to_whole(part: Tensor, group: Group, dim: int, size: int) -> Tensor:
    """Return the `tp` ranks' ranges along `dim`, concatenated to `size`: inverse of `to_parts`."""
    return gather(part, group, dim, size, "to_whole")


def collective_of(node: Node) -> PairedCollective | None:
    """Return the paired collective that created a node of an autograd graph on the meta device, or None."""
    collective: PairedCollective | None = tag_of(node, _TAG)
    return collective


def _sum(group: Group, overlap: Overlap | None, gradient: Tensor) -> Tensor:
    if gradient.is_meta:
        group.skip("all_reduce", gradient)
        if overlap is not None:
            overlap()
        return gradient
    # Not in place: other nodes may share the gradient's memory.
    pending = all_reduce(gradient, group, out=torch.empty_like(gradient), checked=False)
    if overlap is not None:
        overlap()
    return pending.wait()


def _sum_in_place(group: Group, tensor: Tensor) -> Tensor:
    if tensor.is_meta:  # written to all the same, so that recomputation keeps what it keeps in a run
        group.skip("all_reduce", tensor)
        return tensor.zero_()
    return all_reduce(tensor, group, checked=False).wait()


def _registered_whole(gather: Gather, registry: GatherRegistry | None, gradient: Tensor) -> Tensor:
    whole = gather.whole(gradient)
    if registry is not None:
        registry.add(whole, gradient, gather)
    return whole


def _part(group: Group, dim: int, whole: Tensor) -> Tensor:
    # Never a view: a part may be written to, and should not keep the whole alive.
    return own_range(whole, group, dim).clone(memory_format=torch.contiguous_format)


def _reduce_scattered(group: Group, dim: int, overlap: Overlap | None, summand: Tensor) -> Tensor:
    pending = start_reduce_scatter(summand, group, dim)
    if overlap is not None:
        overlap()
    return pending()


def _compared(group: Group, tensor: Tensor) -> Tensor:
    require_same_bits(tensor, group, _ENTERS)
    return tensor


def _compared_part(group: Group, dim: int, whole: Tensor) -> Tensor:
    return _part(group, dim, _compared(group, whole))


def _own_size(whole: Tensor, group: Group, dim: int) -> int:
    return len(divide(whole.shape[dim], group.size)[group.index])


def _paired(
    collective: PairedCollective,
    tensor: Tensor,
    group: Group,
    forward: Operation | None,
    backward: Operation | None,
    dim: int = 0,
    size: int | None = None,
    *,
    writes: bool = False,
    regather: Gather | None = None,
    inputs: CastInputs | None = None,
) -> Tensor:
    """Return `forward(tensor)`, whose gradient passes through `backward`; for one rank, `tensor` itself.

    None for one of the two: nothing. The result has `size` elements along `dim`, by default as many as
    `tensor`. `writes`: `forward` may write to it. `regather`: see `RecordedPair`. `inputs`: see `copy`.
    """
    if group.size == 1:
        return tensor
    trace = TRACE.get()
    if trace is not None:
        shape = list(tensor.shape)
        shape[dim] = shape[dim] if size is None else size
        pair = RecordedPair(forward, backward, writes, regather)
        if inputs is None:
            return trace.record(tensor, shape, pair)
        result, carrier = trace.record_with_carrier(tensor, shape, pair)
        inputs.enter(result, carrier, InputGradient())
        return result
    if inputs is not None and torch.is_grad_enabled():
        of_input = InputGradient()
        result, carrier = _PairedWithCarrier.apply(tensor, forward, backward, of_input)  # type: ignore[no-untyped-call]
        inputs.enter(result, carrier, of_input)
        return result  # type: ignore[no-any-return]
    return tag(_Paired.apply(tensor, forward, backward), _TAG, collective)  # type: ignore[no-untyped-call]


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Operation | None, backward: Operation | None) -> Tensor:
        ctx.gradient_of = backward
        if forward is None:
            return tensor.view_as(tensor)
        result = forward(tensor)
        if result is tensor:  # summed in place
            ctx.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Gradients are enabled inside a backward only under create_graph.
        if torch.is_grad_enabled():
            raise ModelError(
                "a tensor-parallel layer met a backward with create_graph: its collectives have no second "
                "derivative, so take first-order gradients only."
            )
        return gradient if ctx.gradient_of is None else ctx.gradient_of(gradient), None, None


class _PairedWithCarrier(torch.autograd.Function):
    """Autograd function as `_Paired`, also of a carrier of the result, whose gradient is in a wide dtype."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Operation | None, backward: Operation, of_input: InputGradient
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gradient_of, ctx.dtype, ctx.of_input = backward, tensor.dtype, of_input
        result = tensor.view_as(tensor) if forward is None else forward(tensor)
        return result, carrier_like(result)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, of_carrier: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        summand = sum_of_gradients(gradient, of_carrier, ctx.of_input.total())
        of_tensor = None if summand is None else ctx.gradient_of(summand).to(ctx.dtype)
        return of_tensor, None, None, None
