"""Recipes of float8 linears: how each operand of a linear's three matrix products is cast.

    output             O  = X Wᵀ     X [tokens, in], W [out, in]
    input gradient     dX = G W      G [tokens, out]
    weight gradient    dW = Gᵀ X

An operand has one scale, or one for each of its vectors along the dim that the product sums over. The recipes
are those of torchao's `Float8LinearConfig` (`tensorwise`, `rowwise`, `rowwise_with_gw_hp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

Scaling = Literal["tensor", "row"]


@dataclass(frozen=True)
class CastFormat:
    """How one operand of a matrix product is cast to float8."""

    dtype: torch.dtype
    per: Scaling
    """Whether the whole tensor has one scale, or each vector along the dim that the product sums over."""
    power_of_two: bool = False
    """Whether the factor by which values are multiplied before the cast is rounded down to a power of two."""


@dataclass(frozen=True)
class Recipe:
    """The formats of the operands of a float8 linear's three products."""

    name: str
    """The value of `Plan.linears`."""
    input: CastFormat
    """Of X in O = X Wᵀ."""
    weight: CastFormat
    """Of W in O = X Wᵀ."""
    gradient: CastFormat
    """Of G in dX = G W."""
    weight_for_input: CastFormat
    """Of W in dX = G W."""
    gradient_for_weight: CastFormat | None
    """Of G in dW = Gᵀ X; None: that product is not in float8."""
    input_for_weight: CastFormat | None
    """Of X in dW = Gᵀ X; None: that product is not in float8."""

    @property
    def casts_input_once(self) -> bool:
        """Whether both products with the input take it cast with one scale."""
        return self.input == self.input_for_weight and self.input.per == "tensor"

    @property
    def casts_gradient_once(self) -> bool:
        """Whether both products with the output gradient take it cast with one scale."""
        return self.gradient == self.gradient_for_weight and self.gradient.per == "tensor"

    @property
    def casts_weight_once(self) -> bool:
        """Whether both products with the weight take it cast with one scale, so that it can be kept so."""
        return self.weight == self.weight_for_input and self.weight.per == "tensor"

    @property
    def scales_rows_alone(self) -> bool:
        """Whether a token's scales come from that token, so that no number depends on the micro-batches."""
        rows = self.input, self.gradient
        return self.input_for_weight is None and all(one.per == "row" for one in rows)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TENSOR, _TENSOR_GRADIENT = CastFormat(_E4M3, "tensor"), CastFormat(_E5M2, "tensor")
_ROW, _TENSOR_POWER = CastFormat(_E4M3, "row", True), CastFormat(_E4M3, "tensor", True)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        one.name: one
        for one in (
            Recipe("float8", _TENSOR, _TENSOR, _TENSOR_GRADIENT, _TENSOR, _TENSOR_GRADIENT, _TENSOR),
            Recipe("float8-rowwise", _ROW, _ROW, _ROW, _ROW, _ROW, _ROW),
            Recipe("float8-rowwise-gw", _ROW, _ROW, _ROW, _TENSOR_POWER, None, None),
        )
    }
)
"""The recipes by their names in `Plan.linears`."""
