"""Products of float8 rows by their expert's matrix: a loop, one kernel under CUDA's rules, shapes on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.tensor.experts import grouped_float8_products
from plait.tensor.experts.grouped_float8_products import grouped_float8_product
from plait.tensor.experts.grouped_products import Groups
from plait.tensor.float8.cast import ScaledMatrix, cast, cast_by, factor_of, largest_of
from plait.tensor.float8.recipes import CastFormat
from plait.tensor.float8.scaled_product import product

ROW = CastFormat(torch.float8_e4m3fn, "row", True)
SIZES = {"uneven": (7, 0, 33, 1), "none": (0, 0, 0, 0), "one": (0, 0, 5, 0), "many": (16, 32, 64, 16)}


def groups_of(sizes: tuple[int, ...]) -> Groups:
    return Groups.of(sizes, torch.tensor(sizes).cumsum(0).int())


def operands(
    sizes: tuple[int, ...], per: str, dtype: Any = torch.bfloat16
) -> tuple[ScaledMatrix, ScaledMatrix]:
    """Rows of 48 features, and matrices `[groups, 48, 32]` with a scale for each column, or one."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 48, generator=draw) * torch.randn(sum(sizes), 1, generator=draw).exp()
    weights = torch.randn(len(sizes), 32, 48, generator=draw) * torch.randn(4, 32, 1, generator=draw).exp()
    weights = weights.to(dtype)
    largest = largest_of(weights, "row", 2)
    largest = largest.amax(1, keepdim=True) if per == "matrix" else largest
    of_weights = cast_by(weights, factor_of(largest, ROW), ROW)
    return cast(rows.to(dtype), ROW), ScaledMatrix(of_weights.data.mT, of_weights.scale.mT)


def values(matrix: ScaledMatrix) -> Tensor:
    return matrix.data.double() * matrix.scale.double()


@pytest.mark.parametrize("per", ["column", "matrix"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(
    dtype: torch.dtype, sizes: tuple[int, ...], per: str
) -> None:
    rows, matrices = operands(sizes, per, dtype)
    found = grouped_float8_product(rows, matrices, groups_of(sizes), dtype)
    assert (found.dtype, found.shape) == (dtype, (sum(sizes), 32))
    each = torch.split(values(rows), sizes)
    exact = torch.cat([part @ matrix for part, matrix in zip(each, values(matrices), strict=True)])
    bound = 1e-15 if dtype == torch.float64 else 40 * 2**-24
    bound += torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    assert torch.allclose(found.double(), exact, atol=bound * float(exact.abs().sum() or 1), rtol=bound)


@pytest.mark.parametrize("per", ["column", "matrix"])
def test_the_loop_has_the_bits_of_a_linear_for_each_group(per: str) -> None:
    sizes = SIZES["uneven"]
    rows, matrices = operands(sizes, per)
    found = torch.split(grouped_float8_product(rows, matrices, groups_of(sizes), torch.bfloat16), list(sizes))
    data, scales = torch.split(rows.data, list(sizes)), torch.split(rows.scale, list(sizes))
    for number, size in enumerate(sizes):
        if size:
            scale = matrices.scale[number]
            own = ScaledMatrix(matrices.data[number], scale if per == "column" else scale.view(()))
            alone = product(ScaledMatrix(data[number], scales[number]), own, torch.bfloat16)
            assert torch.equal(found[number], alone)


def under_the_rules_of_cuda(
    rows: Tensor, matrices: Tensor, scales: Tensor, kind: Any, of_columns: Tensor, other: Any, **more: Any
) -> Tensor:
    """What `scaled_grouped_mm` of CUDA refuses, as seen on an H200 with torch 2.11; the product by a loop."""
    assert kind == other == functional.ScalingType.RowWise
    assert rows.stride() == (rows.shape[1], 1)
    assert matrices.stride(1) == 1
    assert all(size % 16 == 0 for size in matrices.shape[1:])
    assert scales.shape == rows.shape[:1]
    assert of_columns.shape == (len(matrices), matrices.shape[2])
    assert all(one.is_contiguous() and one.dtype == torch.float32 for one in (scales, of_columns))
    ends = more["offs"]
    assert (ends.dtype, ends.shape) == (torch.int32, matrices.shape[:1])
    assert more["output_dtype"] == torch.bfloat16
    starts = [0, *ends.tolist()]
    parts = zip(starts, ends.tolist(), matrices, of_columns, strict=False)
    whole = rows.double() * scales[:, None]
    return torch.cat([whole[a:b] @ (one.double() * by) for a, b, one, by in parts]).bfloat16()


@pytest.mark.parametrize("per", ["column", "matrix"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_kernel_gets_what_it_takes_and_gives_what_the_loop_does(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], per: str
) -> None:
    rows, matrices = operands(sizes, per)
    loop = grouped_float8_product(rows, matrices, groups_of(sizes), torch.bfloat16)
    monkeypatch.setattr(grouped_float8_products, "multiplies_float8_groups", lambda *_: True)
    monkeypatch.setattr(functional, "scaled_grouped_mm", under_the_rules_of_cuda)
    stored_otherwise = ScaledMatrix(matrices.data.contiguous(), matrices.scale)
    for given in (matrices, stored_otherwise):
        found = grouped_float8_product(rows, given, groups_of(sizes), torch.bfloat16)
        torch.testing.assert_close(found, loop, rtol=2**-7, atol=1e-5)


def test_on_meta_there_are_shapes_and_groups_without_rows() -> None:
    for sizes in ((4, 4, 3, 3), (0, 0, 0, 0)):
        rows, matrices = operands(sizes, "column")
        there = (ScaledMatrix(*(one.to("meta") for one in each)) for each in (rows, matrices))
        found = grouped_float8_product(*there, groups_of(sizes), torch.bfloat16)
        assert (found.shape, found.dtype, found.is_meta) == ((sum(sizes), 32), torch.bfloat16, True)
