"""Products of float8 rows that are sorted into groups, with a float8 matrix for each group.

By `torch.nn.functional.scaled_grouped_mm` on a GPU that has it, else in a loop over the groups, whose sizes
the host knows, by the products of float8 linears. Rows of a group may be any number: only products that sum
over them, as those of weight gradients, which are in 16 bits, would need multiples of 16. On meta groups of
equal size are one batch, as in `grouped_products`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.ranks.accelerator import multiplies_float8_groups
from plait.tensor.experts.grouped_products import Groups, batches, parts
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import product

_SCALE_A_ROW = functional.ScalingType.RowWise

torch.library.define("plait::batched_float8_product", "(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)")
BATCHED_PRODUCT: Any = torch.ops.plait.batched_float8_product.default
"""On meta alone, the products `[n, rows, in] @ [n, in, out]` of float8 matrices, written to `out`."""
torch.library.impl("plait::batched_float8_product", "Meta")(lambda a, b, *, out: out)


def grouped_float8_product(
    rows: ScaledMatrix, matrices: ScaledMatrix, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Return rows `[rows, in]` times the matrix of each row's group, `[groups, in, out]`, in `dtype`.

    Scales: of each row, `[rows, 1]`, and of each column of a matrix, `[groups, 1, out]`, or of each matrix,
    `[groups, 1, 1]`. Sums are in fp32, for fp64 in fp64. `in` and `out` are multiples of 16.
    """
    if multiplies_float8_groups(rows.data, dtype) and rows.data.numel():
        return _by_one_kernel(rows, matrices, groups, dtype)
    result = rows.data.new_empty(rows.data.shape[0], matrices.data.shape[2], dtype=dtype)
    if result.is_meta:
        for which, given, out in batches(groups, rows.data, result):
            one = out.new_empty(out.shape[1:]), matrices.data[:1].mT.contiguous()  # as in the loop below
            BATCHED_PRODUCT(given, matrices.data[which], out=out)
            del one
        return result
    each = parts(rows.data, groups), parts(rows.scale, groups), parts(result, groups)
    for data, scale, out, matrix, of_matrix in zip(*each, *matrices, strict=True):
        if len(data):
            by_column = of_matrix if of_matrix.numel() > 1 else of_matrix.view(())
            out.copy_(product(ScaledMatrix(data, scale), ScaledMatrix(matrix, by_column), dtype))
    return result


def _by_one_kernel(rows: ScaledMatrix, matrices: ScaledMatrix, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the product by CUDA's kernel, which takes rows by rows, and matrices by columns."""
    count, _, columns = matrices.data.shape
    result: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows.data.contiguous(),
        matrices.data.mT.contiguous().mT,
        rows.scale.flatten(),
        _SCALE_A_ROW,
        matrices.scale.expand(count, 1, columns).contiguous().view(count, columns),
        _SCALE_A_ROW,
        offs=groups.ends,
        output_dtype=dtype,
    )
    return result
