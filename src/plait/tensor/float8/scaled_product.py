"""Products of float8 matrices, under CUDA's rules on every device, since CPUs take what CUDA refuses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from plait.errors import ModelError
from plait.tensor.float8.cast import ScaledMatrix

MULTIPLE = 16
"""The size of the summed dim and the columns of the result are multiples of it (16 bytes: cuBLASLt)."""
_RESULTS = (torch.bfloat16, torch.float32)
"""Dtypes in which a product can be asked for; others are computed in fp32 and converted."""


def product(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """Return `a @ b` `[rows, columns]` in `dtype`; sums are in fp32, or in fp64 where `dtype` is that.

    `a` is `[rows, summed]` in row-major order, `b` `[summed, columns]` in column-major order. ModelError for
    operands that CUDA refuses.
    """
    _require_allowed(a.data, b.data)
    if dtype == torch.float64:
        return (a.data.double() @ b.data.double()) * (a.scale.double() * b.scale.double())
    kind_a, kind_b = _kind_of(a), _kind_of(b)
    scale_a, scale_b = a.scale, b.scale
    if kind_a != kind_b:  # both of one kind: one scale repeated for each row, or each column
        if kind_a == ScalingType.TensorWise:
            scale_a = scale_a.repeat(a.data.shape[0], 1)
        else:
            scale_b = scale_b.repeat(1, b.data.shape[1])
        kind_a = kind_b = ScalingType.RowWise
    given = dtype if dtype in _RESULTS else torch.float32
    result: Tensor = scaled_mm(
        a.data, b.data, scale_a.contiguous(), kind_a, scale_b.contiguous(), kind_b, output_dtype=given
    )
    return result.to(dtype)


def is_multiple(*sizes: int) -> bool:
    """Return whether all sizes are multiples of 16, as operands of float8 products must have them."""
    return all(size % MULTIPLE == 0 for size in sizes)


def _kind_of(matrix: ScaledMatrix) -> ScalingType:
    return ScalingType.TensorWise if matrix.scale.dim() == 0 else ScalingType.RowWise


def _require_allowed(a: Tensor, b: Tensor) -> None:
    """Raise ModelError for operands that CUDA's float8 products refuse."""
    (_, summed), columns = a.shape, b.shape[1]
    if not is_multiple(summed, columns):
        raise ModelError(
            f"a float8 product of shapes {list(a.shape)} and {list(b.shape)} needs sizes that are "
            f"multiples of {MULTIPLE}, but for the rows of the first: set plan.linears to None, or "
            "choose other sizes."
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ModelError(
            "a float8 product has two operands in e5m2, which CUDA does not multiply: cast one to e4m3."
        )
    if not a.is_contiguous() or not b.t().is_contiguous():
        raise ModelError(
            f"a float8 product of strides {a.stride()} and {b.stride()} needs the first operand in row-major "
            "and the second in column-major order: transpose what is stored otherwise."
        )
