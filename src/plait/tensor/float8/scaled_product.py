"""Products of float8 matrices; every device takes only operands that CUDA takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import ModelError
from plait.ranks.accelerator import is_accelerator
from plait.tensor.float8.cast import ScaledMatrix

_ONE_SCALE, _SCALE_A_ROW = functional.ScalingType.TensorWise, functional.ScalingType.RowWise
MULTIPLE = 16
"""CUDA multiplies float8 matrices whose summed dim, and whose columns of the result, are multiples of it."""
_RESULTS = (torch.bfloat16, torch.float32)
"""Dtypes in which a product can be asked for; others are computed in fp32 and converted."""


def product(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """Return `a @ b`, of `a` `[rows, summed]` and `b` `[summed, columns]`, in `dtype`.

    Sums are in fp32, for fp64 in fp64. Operands that are not stored as CUDA requires, `a` by rows and `b` by
    columns, are copied. A summed dim that is no multiple of 16, such as the tokens of a weight gradient, is
    padded with zeros. ModelError where the columns are none, or both operands are in e5m2.
    """
    _require_allowed(a.data, b.data)
    if dtype == torch.float64:
        return (a.data.double() @ b.data.double()) * (a.scale.double() * b.scale.double())
    summed = a.data.shape[1]
    left, right = _by_rows(a.data, -summed % MULTIPLE), _by_rows(b.data.t(), -summed % MULTIPLE)
    given = dtype if dtype in _RESULTS else torch.float32
    if a.scale.dim() == b.scale.dim() == 0:
        result = _multiplied(left, right, a.scale, b.scale, _ONE_SCALE, given)
    elif is_accelerator(left):
        # CUDA's products by rows are slow where they sum in fp32, and not all give fp32.
        one = a.scale.new_ones(())
        result = _multiplied(left, right, one, one, _ONE_SCALE, given).mul_(a.scale).mul_(b.scale)
    else:
        rows, columns = _for_each(a.scale, len(left)), _for_each(b.scale, len(right))
        result = _multiplied(left, right, rows[:, None], columns[None], _SCALE_A_ROW, given)
    return result.to(dtype)


def _multiplied(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    kind: functional.ScalingType,
    dtype: torch.dtype,
) -> Tensor:
    """Return `left @ right.T` of matrices in row-major order, with scales of one kind."""
    try:
        result: Tensor = functional.scaled_mm(
            left, right.t(), scale_left, kind, scale_right, kind, output_dtype=dtype
        )
    except NotImplementedError:  # older torch, such as 2.11, on a CPU
        return ((left.float() @ right.float().t()) * scale_left * scale_right).to(dtype)
    return result


def by_columns(matrix: ScaledMatrix) -> ScaledMatrix:
    """Return `matrix` stored by columns, as CUDA requires of the second operand: a copy of its data."""
    return ScaledMatrix(matrix.data.t().contiguous().t(), matrix.scale)


def is_multiple(*sizes: int) -> bool:
    """Return whether all sizes are multiples of 16, as CUDA asks of float8 matrices."""
    return all(size % MULTIPLE == 0 for size in sizes)


def _for_each(scale: Tensor, count: int) -> Tensor:
    """Return the scales of `count` rows or columns, contiguous; CUDA takes two operands of one kind."""
    return scale.repeat(count) if scale.dim() == 0 else scale.flatten()


def _by_rows(data: Tensor, missing: int) -> Tensor:
    """Return `data` in row-major order, with `missing` columns of zeros at its end."""
    if missing:  # of bytes, as not every operation knows float8
        return functional.pad(data.view(torch.uint8), (0, missing)).contiguous().view(data.dtype)
    return data.contiguous()


def _require_allowed(a: Tensor, b: Tensor) -> None:
    """Raise ModelError for operands that CUDA's float8 products refuse."""
    if not is_multiple(b.shape[1]):
        raise ModelError(
            f"a float8 product of shapes {list(a.shape)} and {list(b.shape)} has {b.shape[1]} columns, no "
            f"multiple of {MULTIPLE}, which CUDA refuses: set plan.linears to None, or choose other sizes."
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ModelError(
            "a float8 product has two operands in e5m2, which CUDA does not multiply: cast one to e4m3."
        )


torch.library.define(
    "plait::scaled_product",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype) -> Tensor",
)
SCALED_PRODUCT: Any = torch.ops.plait.scaled_product.default
"""Operator for `product` in the graphs of compiled layers."""


def _scaled_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return product(ScaledMatrix(a, scale_a), ScaledMatrix(b, scale_b), dtype)


def _like_scaled_product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


torch.library.impl("plait::scaled_product", ("CPU", "CUDA"), _scaled_product)
torch.library.register_fake("plait::scaled_product", _like_scaled_product)
