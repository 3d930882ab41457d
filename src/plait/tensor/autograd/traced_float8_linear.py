"""Float8 linears of compiled layers: casts and products in the layer's graphs, scales reduced between them.

The weight gradient is a product of the graph's backward, which the compiler takes out of it for `W`. Graphs
write operands in the order in which products read them, which a product by itself would copy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.tensor.autograd.cast_inputs import CastInputs, wide
from plait.tensor.autograd.eager_operations import EAGER_OPERATION, LayerTrace
from plait.tensor.autograd.float8_operands import Groups, LinearCasts, reduced, transposed
from plait.tensor.autograd.paired_collectives import SumOfSummands
from plait.tensor.autograd.torch_calls import rows_of
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
    weight_scale: Tensor | None,
) -> Tensor:
    """Return what `float8_linear` does, while a layer is traced; `weight` is `[out, in]`."""
    cast = inputs.of(input, casts.reducing(TracedReductions(trace)))
    own = casts.reducing(TracedReductions(trace, casts))
    shape = *input.shape[:-1], weight.shape[0]
    kept = cast.saved(input, None, is_traced=True) if weight.requires_grad else None
    dtype = input.dtype if output_sum is None else wide(input.dtype)
    made = _TracedProduct.apply(  # type: ignore[no-untyped-call]
        cast.carrier,
        weight,
        weight_scale,
        *cast.for_output,
        None if kept is None else kept.data,
        None if kept is None else kept.scale,
        own,
        dtype,
    )
    output: Tensor = made.view(shape)
    if output_sum is not None:
        numbers = trace.numbers(output_sum.total, output_sum.gradient)
        output = _TracedSum.apply(output, output_sum.shape(output.shape), *numbers, input.dtype)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


class TracedReductions:
    """Reductions of largest values, recorded for the trace of a layer.

    Those of the backward are recorded in the forward: autograd may run it where there is no trace.
    """

    def __init__(self, trace: LayerTrace, casts: LinearCasts | None = None) -> None:
        """`casts`: whose reductions are recorded at once."""
        self._trace = trace
        self._numbers: dict[Groups, int] = {}
        for groups in () if casts is None else casts.all_groups():
            self._number(groups)

    def __call__(self, largest: Tensor, groups: Groups) -> Tensor:
        """Return a tensor in place of the maximum over the ranks of all groups."""
        found: Tensor = EAGER_OPERATION(largest, self._number(groups), largest.shape)
        return found

    def _number(self, groups: Groups) -> int:
        if groups not in self._numbers:
            (self._numbers[groups],) = self._trace.numbers(partial(_reduced, groups))
        return self._numbers[groups]


def _reduced(groups: Groups, largest: Tensor) -> Tensor:
    return reduced(largest, groups)


class _TracedProduct(torch.autograd.Function):
    """Autograd function of a float8 linear in a traced layer: float8 products forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        data: Tensor,
        scale: Tensor,
        kept: Tensor | None,
        kept_scale: Tensor | None,
        casts: LinearCasts,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(weight, weight_scale, kept, kept_scale)
        ctx.casts, ctx.wide, ctx.shape = casts, carrier.dtype, carrier.shape
        made: Tensor = SCALED_PRODUCT(data, scale, *transposed(casts.weight(weight, weight_scale)), dtype)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, kept, kept_scale = ctx.saved_tensors
        casts, rows, needs_input = ctx.casts, rows_of(gradient), ctx.needs_input_grad[0]
        for_input = casts.gradient(rows) if needs_input else None
        of_input = of_weight = None
        if for_input is not None:
            by_weight = by_columns(casts.weight_for_input(weight, weight_scale))
            made = SCALED_PRODUCT(*for_input, *by_weight, ctx.wide)
            of_input = made.view(ctx.shape)
        if kept is not None:
            cast = casts.gradient_for_weight(rows, for_input)
            if cast is None:
                of_weight = rows.t() @ rows_of(kept)
            else:
                input = ScaledMatrix(kept, kept_scale)
                of_weight = SCALED_PRODUCT(*transposed(by_columns(cast)), *input, weight.dtype)
        return of_input, of_weight, *(None,) * 7


class _TracedSum(torch.autograd.Function):
    """Autograd function of the sum of the ranks' outputs, rounded to the dtype of the input."""

    @staticmethod
    def forward(
        ctx: Any, summand: Tensor, shape: list[int], total: int, back: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.back, ctx.shape = back, tuple(summand.shape)
        made: Tensor = EAGER_OPERATION(summand, total, shape).to(dtype)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return EAGER_OPERATION(gradient, ctx.back, ctx.shape), None, None, None, None
