"""Linear in float8 with deferred weight gradient, for the linears that `Plan.linears` selects.

    F   cast X, W      O = X Wᵀ           saved for W: X in float8, or X where dW is not computed in float8
    I   cast G, W      dX = G W           queued: X and G in float8
    W                  dW = Gᵀ X          added to the weight's gradient buffer

Linears that read the same input leave their G to the backward of its carrier (see `float8_inputs`), which
casts them by one reduction of largest values.

Products are summed in fp32. They are rounded to the dtype of the input where the sum is complete: outputs and
input gradients that are summands of several ranks of `tp` are summed in fp32 first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.autograd.deferred_weight_gradients import add_product
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.autograd.float8_inputs import (
    CastInput,
    InputGradient,
    LinearGradient,
    SavedInput,
    as_matrix,
    own_part,
    wide,
)
from plait.tensor.autograd.float8_operands import LinearCasts, transposed
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.autograd.paired_collectives import SumOfSummands
from plait.tensor.autograd.private_torch_functions import apply_function, reshaped_in_place, rows_of
from plait.tensor.autograd.split_backward import refuse_other_orders
from plait.tensor.autograd.traced_float8_linear import WeightScales, traced_float8_linear
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import product


@dataclass(frozen=True)
class _Float8Call:
    """Arguments of a float8 linear's forward that its autograd function takes as one object."""

    input: Tensor
    weight: Tensor
    """`[outputs, inputs]`, a view where it is stored transposed."""
    weight_scale: Tensor | None
    casts: LinearCasts
    queue: WeightGradientQueue
    transposed: bool
    output_sum: SumOfSummands | None

    def output(self, for_output: ScaledMatrix, bias: Tensor | None) -> Tensor:
        """Return the output `[..., outputs]` in the dtype of the input."""
        dtype, shape = self.input.dtype, (*self.input.shape[:-1], self.weight.shape[0])
        weight = transposed(self.casts.weight(self.weight.detach(), self.weight_scale))
        if self.output_sum is None:
            result = reshaped_in_place(product(for_output, weight, dtype), shape)
        else:
            summand = reshaped_in_place(product(for_output, weight, wide(dtype)), shape)
            result = self.output_sum.total(summand).to(dtype)
        return result if bias is None else result.add_(bias)


def float8_linear(
    module: Any,
    input: Tensor,
    queue: WeightGradientQueue | None,
    *,
    is_transposed: bool = False,
    output_sum: SumOfSummands | None = None,
) -> Tensor:
    """Return the output of a linear by a product in float8; its backward queues the weight gradient.

    `module` has `weight` `[out, in]`, or `[in, out]` where transposed, `bias`, `casts`, its `LinearCasts`,
    and `weight_scale`, with which the weight is in float8; None: it is cast, in graphs by `weight_factor` and
    `weight_factor_for_input`. `output_sum`: sums the ranks'
    outputs; the bias is then added elsewhere. Communication: that of the casts, and of `output_sum`. Raises
    ModelError within `torch.autocast`.
    """
    assert queue is not None, "an engine's layers have a queue"
    weight, casts = module.weight, module.casts
    _require_dtype(module, input)
    bias = module.bias if output_sum is None else None
    by_rows, trace = weight.t() if is_transposed else weight, TRACE.get()
    if trace is not None:
        how = WeightScales(module.weight_scale, None, None)
        if how.scale is None:
            how = WeightScales(None, module.weight_factor, module.weight_factor_for_input)
        return traced_float8_linear(input, by_rows, bias, queue.inputs, casts, trace, output_sum, how)
    call = _Float8Call(input, by_rows, module.weight_scale, casts, queue, is_transposed, output_sum)
    cast = queue.inputs.of(input, casts)
    if cast.carrier is None:
        return call.output(cast.for_output, bias)
    run = RECOMPUTED_RUN.get()
    apply = partial(apply_function, _Float8Linear, cast.carrier, weight, bias, call, cast)
    if run is None:
        return apply(False)  # type: ignore[no-any-return]
    if not run.is_second:
        return run.result(lambda: (apply(False),))[0]  # type: ignore[return-value]
    output: Tensor = apply(True)
    # After the input is saved, where a second run may end.
    with torch.no_grad():
        made = run.result(lambda: (call.output(cast.for_output, bias),))[0]
        output.set_(made)  # type: ignore[call-overload]
    return output


def _require_dtype(module: Any, input: Tensor) -> None:
    """Raise ModelError if the output would have another dtype than without float8."""
    weight, casts = module.weight, module.casts
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        raise ModelError(
            f"a linear with a weight {list(weight.shape)} multiplies in float8, by plan.linears, and is "
            "called within torch.autocast, which would give its output another dtype: take torch.autocast "
            "out of the layer (plan.precision sets the dtype), or set plan.linears to None."
        )
    dtype = weight.dtype if module.weight_scale is None else casts.compute
    if dtype is not None and input.dtype != dtype:
        raise ModelError(
            f"a linear with a weight {list(weight.shape)} in {_named(dtype)} multiplies in float8, by "
            f"plan.linears, but its input is in {_named(input.dtype)}: cast that to {_named(dtype)}, as a "
            "linear without float8 asks, too."
        )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Float8Linear(torch.autograd.Function):
    """Autograd function of `x Wᵀ + b` in float8, from the carrier of `x`; queues the gradient of `W`."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: _Float8Call,
        cast: CastInput,
        is_late: bool,
    ) -> Tensor:
        ctx.trains = weight.requires_grad
        if ctx.trains:
            saved = cast.saved(call.input, call.queue.gathered.of(call.input))
            ctx.gather = saved.gather
            ctx.save_for_backward(saved.data, saved.scale)
        else:
            ctx.save_for_backward()
        ctx.weight, ctx.casts, ctx.queue, ctx.transposed = weight, call.casts, call.queue, call.transposed
        ctx.weight_scale, ctx.output_sum, ctx.ran = call.weight_scale, call.output_sum, False
        ctx.of_input = cast.gradient
        if is_late:
            shape: Sequence[int] = (*call.input.shape[:-1], call.weight.shape[0])
            shape = shape if call.output_sum is None else call.output_sum.shape(shape)
            return call.input.new_empty_strided(shape, (0,) * len(shape))  # `float8_linear` sets the memory
        return call.output(cast.for_output, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_other_orders(ctx, "a linear")
        of_bias = rows_of(gradient).sum(0) if ctx.needs_input_grad[2] else None
        saved = None
        if ctx.trains:
            data, scale = ctx.saved_tensors
            saved = SavedInput(data.detach(), scale, ctx.gather)
        output = _output_gradient(ctx, gradient, saved)
        if ctx.needs_input_grad[0]:
            ctx.of_input.add(output)  # the carrier's backward computes it, with those of other readers
        else:
            alone = InputGradient()
            alone.add(output)
            alone.total()
        return None, None, of_bias, None, None, None


def _output_gradient(ctx: Any, gradient: Tensor, saved: SavedInput | None) -> LinearGradient:
    """Return an output gradient as `LinearGradient`; `saved`: the input, if the weight is trained.

    Where ranks have parts of it, and one cast serves both products, each casts its part, which is then
    gathered in eight bits.
    """
    casts, output_sum = ctx.casts, ctx.output_sum
    given, once = gradient, casts.recipe.casts_gradient_once
    gathers = output_sum is not None and output_sum.is_in_parts
    if gathers and not once:
        given, gathers = output_sum.gradient(gradient), False
    rows = rows_of(given)
    needs_input, parts = ctx.needs_input_grad[0], (output_sum.group,) if gathers else ()
    for_input = casts.gradient(rows, parts) if needs_input else None
    casts_again = saved is not None and not (needs_input and once)
    for_weight = casts.gradient_for_weight(rows, parts) if casts_again else None
    matrices = [one for one in (for_input, for_weight) if one is not None]
    whole = output_sum.gradient if gathers else None
    return LinearGradient(matrices, partial(_backward, _LinearBackward.of(ctx), given, saved, whole))


@dataclass(frozen=True)
class _LinearBackward:
    """Arguments of a float8 linear's backward besides its cast operands."""

    weight: Tensor
    weight_scale: Tensor | None
    casts: LinearCasts
    queue: WeightGradientQueue
    transposed: bool
    needs_input: bool

    @staticmethod
    def of(ctx: Any) -> _LinearBackward:
        """Return the `_LinearBackward` of what the autograd function has saved in `ctx`."""
        given = ctx.weight, ctx.weight_scale, ctx.casts, ctx.queue, ctx.transposed
        return _LinearBackward(*given, needs_input=ctx.needs_input_grad[0])

    def input_gradient(self, for_input: ScaledMatrix, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the gradient of the input `[*shape, inputs]` in `dtype`."""
        weight = self.weight.detach()
        by_rows = weight.t() if self.transposed else weight
        made = product(for_input, self.casts.weight_for_input(by_rows, self.weight_scale), dtype)
        return made.view(*shape, made.shape[1])


def _backward(
    linear: _LinearBackward,
    gradient: Tensor,
    saved: SavedInput | None,
    gather: Callable[[Tensor], Tensor] | None,
    casts: Sequence[ScaledMatrix],
) -> Tensor | None:
    """Queue a linear's weight gradient; return its input gradient, in a wide dtype, or None.

    `casts`: of the gradient of its outputs. `gather`: gathers that from the ranks' parts; None: it is whole.
    """
    whole, each = gradient, list(casts)
    if gather is not None and each:
        whole = gather(each[0].data.view(gradient.shape))
        each[0] = ScaledMatrix(rows_of(whole), each[0].scale)
    for_input = each[0] if linear.needs_input else None
    is_shared = linear.needs_input and linear.casts.recipe.casts_gradient_once
    for_weight = for_input if is_shared else next(iter(each[linear.needs_input :]), None)
    if saved is not None:
        queue, is_transposed = linear.queue, linear.transposed
        operands = _gradient_operand(whole, for_weight, queue), _input_operand(saved, queue)
        queue.add(partial(_add_weight_gradient, queue, linear.weight, is_transposed, *operands))
    if not linear.needs_input:
        return None
    assert for_input is not None
    return linear.input_gradient(for_input, whole.shape[:-1], wide(gradient.dtype))


Operand = Callable[[], Tensor | ScaledMatrix]
"""Returns an operand of a weight gradient: in float8, or as it is where that product is not in float8."""


def _input_operand(saved: SavedInput, queue: WeightGradientQueue) -> Operand:
    """Return a function that returns a linear's saved input, gathered again if only a part was saved."""
    if saved.gather is None:
        return lambda: _operand(saved.data, saved.scale)
    again = queue.gathered.again(saved.data, saved.gather)
    if queue.mode.overlaps:  # the work follows after the product for the input gradient
        again.start()
    return lambda: _operand(again.whole(), saved.scale)


def _gradient_operand(gradient: Tensor, cast: ScaledMatrix | None, queue: WeightGradientQueue) -> Operand:
    """Return a function that returns a linear's output gradient: gathered again if it is registered."""
    data, scale = (gradient, None) if cast is None else cast
    # Where the work follows at once, the whole gradient is still in memory.
    source = None if queue.mode.overlaps else queue.gathered.of(gradient)
    if source is None:
        return lambda: _operand(data, scale)
    part, gather = source
    mine = part if part.dtype == data.dtype else own_part(data, gradient.shape, gather)
    again = queue.gathered.again(mine, gather)
    return lambda: _operand(again.whole(), scale)


def _operand(data: Tensor, scale: Tensor | None) -> Tensor | ScaledMatrix:
    return rows_of(data) if scale is None else as_matrix(data, scale)


def _add_weight_gradient(
    queue: WeightGradientQueue, weight: Tensor, is_transposed: bool, gradient: Operand, input: Operand
) -> None:
    """Add the gradient of a linear's weight to its buffer."""
    first = bool(queue.unwritten) and queue.begins((weight,))
    buffer = queue.buffer_of(weight)
    total = buffer.t() if is_transposed else buffer
    left, right = gradient(), input()
    if isinstance(left, ScaledMatrix) and isinstance(right, ScaledMatrix):
        add_float8_product(total, transposed(left), right, first)
    else:
        assert not isinstance(left, ScaledMatrix), "both operands are cast, or none"
        assert not isinstance(right, ScaledMatrix), "both operands are cast, or none"
        add_product(total, left.t(), right, first)


def add_float8_product(total: Tensor, a: ScaledMatrix, b: ScaledMatrix, first: bool) -> None:
    """Add the product of float8 matrices `a @ b` to `total` in place; `first`: overwrite `total`."""
    made = product(a, b, total.dtype)
    if first:
        total.copy_(made)
    else:
        total.add_(made)
