"""Float8 linears of compiled layers: casts and products in the layer's graphs, scales reduced between them.

The weight gradient is a product of the graph's backward, which the compiler takes out of it for `W`. Graphs
write operands in the order in which products read them, which a product by itself would copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.tensor.autograd.eager_operations import EAGER_OPERATION, LayerTrace
from plait.tensor.autograd.float8_inputs import CastInputs, carrier_like, wide
from plait.tensor.autograd.float8_operands import (
    Groups,
    LinearCasts,
    MatrixToCast,
    cast_together,
    reduced,
    transposed,
)
from plait.tensor.autograd.paired_collectives import SumOfSummands
from plait.tensor.autograd.private_torch_functions import rows_of
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import SCALED_PRODUCT, by_columns


def traced_float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: CastInputs,
    casts: LinearCasts,
    trace: LayerTrace,
    output_sum: SumOfSummands | None,
    how_weight: WeightScales,
) -> Tensor:
    """Record a float8 linear in `trace`; return a tensor in place of its output; `weight` is `[out, in]`."""
    cast = inputs.of(input, casts.reducing(TracedReductions(trace)))
    # None where the layer, or this call, needs no gradient.
    carrier = carrier_like(input) if cast.carrier is None else cast.carrier
    kept = cast.saved(input, None, is_traced=True) if weight.requires_grad else None
    call = _TracedCall.of(input, weight, casts, trace, output_sum)
    output: Tensor = _TracedLinear.apply(  # type: ignore[no-untyped-call]
        carrier,
        weight,
        *how_weight,
        *cast.for_output,
        None if kept is None else kept.data,
        None if kept is None else kept.scale,
        call,
    )
    return output if bias is None else output + bias


class WeightScales(NamedTuple):
    """The scale of a weight that is in float8 already, or the factors by which its casts multiply it."""

    scale: Tensor | None
    factor: Tensor | None
    factor_for_input: Tensor | None


@dataclass(frozen=True)
class _TracedCall:
    """Arguments of a float8 linear's call in a traced layer, without tensors."""

    casts: LinearCasts
    """With all reductions that a backward may make recorded in the trace."""
    dtype: torch.dtype
    """Of the input and the output."""
    summand: list[int]
    """The shape of the product, which may be a summand of the output."""
    output: list[int]
    """The shape of the output."""
    total: int | None
    """The number in the trace of the sum of the ranks' products; None: they are not summed."""
    back: int | None
    """That of the gradient of a summand."""
    parts: Groups
    """The group whose ranks have parts of the output, if one cast of its gradient serves both products."""
    regathers: bool
    """Whether weight gradients gather again the cast that is gathered from `parts`."""

    @staticmethod
    def of(
        input: Tensor, weight: Tensor, casts: LinearCasts, trace: LayerTrace, output_sum: SumOfSummands | None
    ) -> _TracedCall:
        """Return a call of a linear that has `casts`; records its communication."""
        shape = [*input.shape[:-1], weight.shape[0]]
        parts: Groups = ()
        regathers = False
        total = back = None
        output = shape
        if output_sum is not None:
            total, back = trace.numbers(output_sum.total, output_sum.gradient)
            output = output_sum.shape(shape)
            if output_sum.is_in_parts and casts.recipe.casts_gradient_once:
                parts = (output_sum.group,)
                regathers = output_sum.registry is not None
        own = casts.reducing(TracedReductions(trace, casts.all_groups(parts)))
        return _TracedCall(own, input.dtype, shape, output, total, back, parts, regathers)

    def cast_gradient(
        self, gradient: Tensor, *, needs_input: bool, trains: bool
    ) -> tuple[Tensor, ScaledMatrix | None, ScaledMatrix | None]:
        """Return the gradient of the product as a matrix, and its casts for input and weight gradient."""
        once = self.casts.recipe.casts_gradient_once
        if self.back is not None and not self.parts:
            gradient = EAGER_OPERATION(gradient, self.back, self.summand)
        rows = rows_of(gradient)
        for_input = self.casts.gradient(rows, self.parts) if needs_input else None
        again = trains and not (needs_input and once)
        for_weight = self.casts.gradient_for_weight(rows, self.parts) if again else None
        casts = [None if one is None else self._gathered(one, gradient) for one in (for_input, for_weight)]
        return rows, casts[0], casts[0] if trains and not again else casts[1]

    def _gathered(self, matrix: MatrixToCast, gradient: Tensor) -> ScaledMatrix:
        """Return the whole output gradient in float8, of which `matrix` may be a part."""
        (cast,) = cast_together([matrix])
        if not self.parts:
            return cast
        whole = EAGER_OPERATION(cast.data.view(gradient.shape), self.back, self.summand)
        return ScaledMatrix(rows_of(whole), cast.scale)


class TracedReductions:
    """Records reductions of largest values in a layer's trace, where `LinearCasts` would run them.

    Those of the backward are recorded in the forward: autograd may run it where there is no trace.
    """

    def __init__(self, trace: LayerTrace, every: Iterable[Groups] = ()) -> None:
        """`every`: the groups over which reductions are recorded at once."""
        self._trace = trace
        self._numbers: dict[Groups, int] = {}
        for groups in every:
            self._number(groups)

    def __call__(self, largest: Tensor, groups: Groups) -> Tensor:
        """Return a tensor in place of the maximum over the ranks of all groups."""
        found: Tensor = EAGER_OPERATION(largest, self._number(groups), largest.shape)
        return found

    def _number(self, groups: Groups) -> int:
        if groups not in self._numbers:
            (self._numbers[groups],) = self._trace.numbers(partial(_reduced, groups))
            self._trace.elementwise[self._numbers[groups]] = groups
        return self._numbers[groups]


def _reduced(groups: Groups, largest: Tensor) -> Tensor:
    return reduced(largest, groups)


class _TracedLinear(torch.autograd.Function):
    """Autograd function of a float8 linear in a traced layer, without its bias."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        factor: Tensor | None,
        factor_for_input: Tensor | None,
        data: Tensor,
        scale: Tensor,
        kept: Tensor | None,
        kept_scale: Tensor | None,
        call: _TracedCall,
    ) -> Tensor:
        ctx.save_for_backward(weight, weight_scale, factor_for_input, kept, kept_scale)
        ctx.call, ctx.wide, ctx.shape = call, carrier.dtype, carrier.shape
        dtype = call.dtype if call.total is None else wide(call.dtype)
        by_rows = ScaledMatrix(data, scale)
        made = _product(by_rows, transposed(call.casts.weight(weight, weight_scale, factor)), dtype)
        made = made.view(call.summand)
        return made if call.total is None else EAGER_OPERATION(made, call.total, call.output).to(call.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, factor, kept, kept_scale = ctx.saved_tensors
        call, needs_input = ctx.call, ctx.needs_input_grad[0]
        trains = kept is not None
        rows, for_input, for_weight = call.cast_gradient(gradient, needs_input=needs_input, trains=trains)
        of_input = of_weight = None
        if for_input is not None:
            by_weight = by_columns(call.casts.weight_for_input(weight, weight_scale, factor))
            of_input = _product(for_input, by_weight, ctx.wide).view(ctx.shape)
        if for_weight is not None:
            input = ScaledMatrix(kept, kept_scale)
            # The queue gathers a gathered tensor again; a copy of one it would keep, whole, until `W`.
            stored = for_weight if call.regathers else by_columns(for_weight)
            of_weight = SCALED_PRODUCT(*transposed(stored), *input, weight.dtype)
        elif trains:
            of_weight = rows.t() @ rows_of(kept)
        return of_input, of_weight, *(None,) * 8


def _product(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """Return `a @ b` in `dtype`; scales of rows multiply it in the graph, where they join what follows.

    As powers of two they change no bit after the product is rounded.
    """
    if a.scale.dim() == b.scale.dim() == 0:
        found: Tensor = SCALED_PRODUCT(*a, *b, dtype)
        return found
    one = torch.ones((), device=a.data.device)
    unscaled: Tensor = SCALED_PRODUCT(a.data, one, b.data, one, dtype)
    return (unscaled * a.scale * b.scale).to(dtype)
