"""Linears in float8 by definition: quantise whole operands, and multiply their quantised values.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

SMALLEST = 1e-12
"""An operand whose elements are all smaller is scaled as if the largest were this one, as torchao does."""


Casting = Callable[[], AbstractContextManager[None]]
"""Returns the context in which operands are cast."""
NoteUnit = Callable[[str, Tensor], None]
"""Given the name of an operand and what its numbers of 1 stand for, notes it."""


class EightBits(NamedTuple):
    """The 8-bit format of an operand, and whether it has one scale or one for each row."""

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
    """The 8-bit formats of all operands of a linear's three products: output, input and weight gradient."""

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


def operands_of(recipe: str) -> dict[str, EightBits | None]:
    """Return a recipe's format of each operand of a linear's three products, by name; None: not cast."""
    output, input_gradient, weight_gradient = RECIPES[recipe]
    return {
        "input": output.left,
        "weight": output.right,
        "gradient": input_gradient.left,
        "weight_for_input": input_gradient.right,
        "gradient_for_weight": weight_gradient.left,
        "input_for_weight": weight_gradient.right,
    }


class Quantised(NamedTuple):
    """A matrix in float8, with its scales."""

    numbers: Tensor
    """Those of the 8-bit format, as float64."""
    unit: Tensor
    """What a number of 1 stands for: float64, `[1, 1]`, or for each row or column."""


def cast_factor_for(largest: Tensor, how: EightBits) -> Tensor:
    """Return the float32 factors by which operands of these `largest` elements are multiplied to be cast.

    A separate function so that modes of torch can replace it.
    """
    if has_torch_function_unary(largest):
        replaced: Tensor = handle_torch_function(cast_factor_for, (largest,), largest, how)
        return replaced
    scale = (torch.finfo(how.dtype).max / largest.double().clamp(min=SMALLEST)).float()
    scale = torch.exp2(torch.log2(scale).floor()) if how.power_of_two else scale
    return scale.where(largest != 0, 1.0)


def cast_factors_of(matrix: Tensor, how: EightBits, dim: int) -> Tensor:
    """Return the factors by which a matrix is multiplied to be cast: `[1, 1]`, or one per vector along `dim`.

    `dim` then has the size 1.
    """
    sizes = matrix.detach().abs()
    dims = (dim,) if how.by_line else (0, 1)
    largest = (sizes.amax if sizes.numel() else sizes.sum)(dims, keepdim=True)  # sums of nothing are zeros
    return cast_factor_for(largest.float(), how)


def quantised(matrix: Tensor, how: EightBits, dim: int) -> Quantised:
    """Return a matrix cast to float8, with its scales.

    `dim`: the one that the product sums over, along which scales are shared.
    """
    scale = cast_factors_of(matrix, how, dim)
    limit = torch.finfo(how.dtype).max
    scaled = matrix.to(torch.promote_types(matrix.dtype, torch.float32)) * scale
    return Quantised(scaled.clamp(-limit, limit).to(how.dtype).double(), scale.reciprocal().double())


def ignore(operand: str, unit: Tensor) -> None:
    """Do nothing: the default callback for the scales of operands."""


def product(
    left: Tensor,
    right: Tensor,
    how: Operands,
    note: NoteUnit = ignore,
    names: tuple[str, str] = ("left", "right"),
) -> Tensor:
    """Return `left @ right` of operands cast to float8 as `how` says, in their dtype; uncast if one is None.

    Sums of products in float8 are exact. `note` is given the units of both operands, under their `names`.
    """
    if how.left is None or how.right is None:
        return left @ right
    a, b = quantised(left, how.left, 1), quantised(right, how.right, 0)
    for name, one in zip(names, (a, b), strict=True):
        note(name, one.unit)
    return ((a.numbers @ b.numbers) * (a.unit * b.unit)).to(left.dtype)


@dataclass(frozen=True)
class Computation:
    """A float8 recipe, the context in which operands are cast, and a callback that gets their scales."""

    recipe: str
    """By its name in `Plan.linears`."""
    casting: Casting = nullcontext
    note: NoteUnit = ignore

    def output(self, input: Tensor, weight: Tensor) -> Tensor:
        """Return X Wᵀ computed in float8, of X `[tokens, in]` and W `[out, in]`."""
        return self._product(input, weight.T, RECIPES[self.recipe].output, ("input", "weight"))

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the input gradient G W computed in float8, of G `[tokens, out]` and W `[out, in]`."""
        names = "gradient", "weight_for_input"
        return self._product(gradient, weight, RECIPES[self.recipe].input_gradient, names)

    def weight_gradient(self, gradient: Tensor, input: Tensor) -> Tensor:
        """Return the weight gradient Gᵀ X computed in float8, or without casts if the recipe says so."""
        names = "gradient_for_weight", "input_for_weight"
        return self._product(gradient.T, input, RECIPES[self.recipe].weight_gradient, names)

    def _product(self, left: Tensor, right: Tensor, how: Operands, names: tuple[str, str]) -> Tensor:
        with self.casting():
            return product(left, right, how, self.note, names)


class _QuantisedLinear(torch.autograd.Function):
    """Autograd function of X Wᵀ in float8, with X `[tokens, in]` and W `[out, in]`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, computation: Computation) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.computation = computation
        return computation.output(input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), computation, needed = ctx.saved_tensors, ctx.computation, ctx.needs_input_grad
        of_input = computation.input_gradient(gradient, weight) if needed[0] else None
        of_weight = computation.weight_gradient(gradient, input) if needed[1] else None
        return of_input, of_weight, None


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, computation: Computation) -> Tensor:
    """Return `input @ weight.T + bias` in float8 by the recipe of `computation`, also in the backward."""
    rows = input.reshape(-1, input.shape[-1])
    result: Tensor = _QuantisedLinear.apply(rows, weight, computation)  # type: ignore[no-untyped-call]
    result = result.view(*input.shape[:-1], len(weight))
    return result if bias is None else result + bias
