"""Casts of matrices to float8 with scales from their largest values, equal to torchao's bit by bit.

factor = largest value of the format / largest |value| of the tensor, or of each row      in fp32
data   = clamp(values · factor), rounded to float8
scale  = 1 / factor                                                 values ≈ data · scale
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from plait.tensor.float8.recipes import CastFormat, Scaling

LEAST = 1e-12
"""Smaller largest values count as this one, as in torchao, so that factors stay finite."""
ReduceLargest = Callable[[Tensor], Tensor]
"""Returns the elementwise maximum of the ranks' tensors of largest values."""


class ScaledMatrix(NamedTuple):
    """A matrix in float8 and the scales, in fp32, by which it is to be multiplied."""

    data: Tensor
    scale: Tensor
    """`[]`, or of the shape of `data` with 1 in place of the dim that a product sums over."""


def cast(
    matrix: Tensor, form: CastFormat, dim: int = -1, reduce_largest: ReduceLargest | None = None
) -> ScaledMatrix:
    """Return `matrix` in float8, with a scale for the whole or for each vector along `dim`.

    `dim` is the one that the product sums over. `reduce_largest` reduces the largest values over the ranks
    that hold other parts of the tensor, or of the vectors.
    """
    largest = largest_of(matrix, form.per, dim)
    return cast_by(
        matrix, factor_of(largest if reduce_largest is None else reduce_largest(largest), form), form
    )


def largest_of(matrix: Tensor, per: Scaling, dim: int = -1) -> Tensor:
    """Return the largest absolute value in fp32: `[]`, or per vector along `dim`, which stays with size 1."""
    if per == "tensor":
        return largest_magnitude(matrix).float()
    if matrix.numel() == 0:  # such as the tokens of an expert that has none
        shape = list(matrix.shape)
        shape[dim] = 1
        return matrix.new_zeros(shape, dtype=torch.float32)
    # In one pass, without a temporary as large as the matrix.
    largest: Tensor = torch.linalg.vector_norm(matrix, torch.inf, dim, keepdim=True)
    return largest.float()


def largest_magnitude(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor, `[]`, in its dtype; 0 where it has no elements."""
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    least, most = torch.aminmax(tensor)  # in one pass, without a temporary as large as the tensor
    return torch.maximum(most, -least)


def factor_of(largest: Tensor, form: CastFormat) -> Tensor:
    """Return the factor, in fp32, that takes `largest` to the largest value of the format; 1 for zero.

    Overridable by a `TorchFunctionMode`.
    """
    if has_torch_function_unary(largest):
        replaced: Tensor = handle_torch_function(factor_of, (largest,), largest, form)
        return replaced
    # In float64, where compiled and eager code divide alike.
    wide = largest.double()
    factor = (torch.finfo(form.dtype).max / wide.clamp(min=LEAST)).float()
    if form.power_of_two:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    return torch.where(largest == 0, 1.0, factor)


def cast_by(matrix: Tensor, factor: Tensor, form: CastFormat, out: Tensor | None = None) -> ScaledMatrix:
    """Return `matrix`, multiplied by `factor` and rounded to float8, with the factor's reciprocal.

    `out`: a tensor of the format's dtype to which it is written; None: a new one.
    """
    bound = torch.finfo(form.dtype).max
    if form.power_of_two and matrix.dtype == torch.bfloat16:  # which has the range of fp32: that is exact
        scaled = matrix * factor.to(matrix.dtype)
    else:
        scaled = matrix.to(torch.promote_types(matrix.dtype, torch.float32)) * factor
    scaled = scaled.clamp_(-bound, bound)  # a rounded factor may exceed the bound
    data = scaled.to(form.dtype) if out is None else out.copy_(scaled)
    return ScaledMatrix(data, factor.reciprocal())
