"""Linears in float8 by definition: quantise whole operands, multiply what they stand for.

The recipes, as torchao documents them, of X `[tokens, in]`, W `[out, in]` and G, the gradient of the output.
Q4 is a cast to e4m3, Q5 to e5m2, with one scale; `rows`: with a scale for each row of a left operand, and for
each column of a right one.

    float8               Q4(X) Q4(W)ᵀ                Q5(G) Q4(W)               Q5(G)ᵀ Q4(X)
    float8-rowwise       Q4 rows(X) Q4 rows(W)ᵀ      Q4 rows(G) Q4 rows(W)     Q4 rows(Gᵀ) Q4 rows(X)
    float8-rowwise-gw    Q4 rows(X) Q4 rows(W)ᵀ      Q4 rows(G) Q4(W)          Gᵀ X

The last two round scales down to powers of two. A scale is that of a micro-batch's tensor as it is: the
largest number of the format over the largest element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

SMALLEST = 1e-12
"""An operand whose elements are all smaller is scaled as if the largest were this one, as torchao does."""


Casting = Callable[[], AbstractContextManager[None]]
"""Returns the context in which operands are cast."""


class EightBits(NamedTuple):
    """How an operand of a product is cast to 8 bits."""

    dtype: torch.dtype = torch.float8_e4m3fn
    by_line: bool = False
    """A scale for each row of a left operand, for each column of a right one; else one for the tensor."""
    power_of_two: bool = False
    """Scales are rounded down to powers of two."""


class Operands(NamedTuple):
    """How the two operands of a product are cast; None: they keep their dtype."""

    left: EightBits | None
    right: EightBits | None


class Products(NamedTuple):
    """The operands of the three products of a linear."""

    output: Operands
    """X Wᵀ."""
    input_gradient: Operands
    """G W."""
    weight_gradient: Operands
    """Gᵀ X."""


E4M3, E5M2 = EightBits(), EightBits(torch.float8_e5m2)
LINES, WHOLE = EightBits(by_line=True, power_of_two=True), EightBits(power_of_two=True)
RECIPES: Mapping[str, Products] = {
    "float8": Products(Operands(E4M3, E4M3), Operands(E5M2, E4M3), Operands(E5M2, E4M3)),
    "float8-rowwise": Products(Operands(LINES, LINES), Operands(LINES, LINES), Operands(LINES, LINES)),
    "float8-rowwise-gw": Products(Operands(LINES, LINES), Operands(LINES, WHOLE), Operands(None, None)),
}
"""By the names of `Plan.linears`."""


class Quantised(NamedTuple):
    """A matrix in 8 bits."""

    numbers: Tensor
    """Those of the 8-bit format, as float64."""
    unit: Tensor
    """What a number of 1 stands for: float64, `[1, 1]`, or for each row or column."""


def scale_for(largest: Tensor, how: EightBits) -> Tensor:
    """Return the scales, float32, for operands whose largest elements are `largest`.

    A separate function so that modes of torch can replace it.
    """
    if has_torch_function_unary(largest):
        replaced: Tensor = handle_torch_function(scale_for, (largest,), largest, how)
        return replaced
    scale = (torch.finfo(how.dtype).max / largest.double().clamp(min=SMALLEST)).float()
    scale = torch.exp2(torch.log2(scale).floor()) if how.power_of_two else scale
    return scale.where(largest != 0, 1.0)


def quantised(matrix: Tensor, how: EightBits, dim: int) -> Quantised:
    """Return a matrix in 8 bits; `dim`: the one that the product sums over, along which a scale is shared."""
    sizes = matrix.detach().abs()
    dims = (dim,) if how.by_line else (0, 1)
    largest = (sizes.amax if sizes.numel() else sizes.sum)(dims, keepdim=True)  # sums of nothing are zeros
    scale = scale_for(largest.float(), how)
    limit = torch.finfo(how.dtype).max
    scaled = matrix.to(torch.promote_types(matrix.dtype, torch.float32)) * scale
    return Quantised(scaled.clamp(-limit, limit).to(how.dtype).double(), scale.reciprocal().double())


def product(left: Tensor, right: Tensor, how: Operands) -> Tensor:
    """Return `left @ right` of operands cast as `how` says, in their dtype; sums are exact."""
    if how.left is None or how.right is None:
        return left @ right
    a, b = quantised(left, how.left, 1), quantised(right, how.right, 0)
    return ((a.numbers @ b.numbers) * (a.unit * b.unit)).to(left.dtype)


class _Linear(torch.autograd.Function):
    """X Wᵀ, with X `[tokens, in]` and W `[out, in]`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, products: Products, casting: Casting) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.products, ctx.casting = products, casting
        with casting():
            return product(input, weight.T, products.output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), products, needed = ctx.saved_tensors, ctx.products, ctx.needs_input_grad
        with ctx.casting():
            of_input = product(gradient, weight, products.input_gradient) if needed[0] else None
            of_weight = product(gradient.T, input, products.weight_gradient) if needed[1] else None
        return of_input, of_weight, None, None


def float8_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, casting: Casting = nullcontext
) -> Tensor:
    """Return `input @ weight.T + bias`, by a recipe of `Plan.linears` also in the backward."""
    rows = input.reshape(-1, input.shape[-1])
    result: Tensor = _Linear.apply(rows, weight, RECIPES[recipe], casting)  # type: ignore[no-untyped-call]
    result = result.view(*input.shape[:-1], len(weight))
    return result if bias is None else result + bias
