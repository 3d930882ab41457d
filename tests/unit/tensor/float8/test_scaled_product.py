"""Products of float8 matrices: sums of the values that the operands stand for, under CUDA's rules."""

import pytest
import torch
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.float8 import scaled_product
from plait.tensor.float8.cast import ScaledMatrix, cast
from plait.tensor.float8.recipes import CastFormat
from plait.tensor.float8.scaled_product import product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(per_a: str, per_b: str) -> tuple[ScaledMatrix, ScaledMatrix]:
    """Matrices `[24, 32]` and `[32, 16]`, of which the second is stored transposed."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(24, 32, generator=draw) * torch.logspace(-2, 2, 24)[:, None]
    b = torch.randn(16, 32, generator=draw) * torch.logspace(-2, 2, 16)[:, None]
    rows = cast(b, CastFormat(E4M3, per_b))  # type: ignore[arg-type]
    scale = rows.scale if per_b == "tensor" else rows.scale.t()
    return cast(a, CastFormat(E5M2, per_a)), ScaledMatrix(rows.data.t(), scale)  # type: ignore[arg-type]


def not_implemented(*_: object, **__: object) -> Tensor:
    raise NotImplementedError


def values(matrix: ScaledMatrix) -> Tensor:
    return matrix.data.double() * matrix.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("per", [("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("tensor", "row")])
@pytest.mark.parametrize("torch_has_it", [True, False])
def test_a_product_is_that_of_the_scaled_values(
    monkeypatch: pytest.MonkeyPatch, per: tuple[str, str], dtype: torch.dtype, torch_has_it: bool
) -> None:
    """Also with a torch, such as 2.11, that has no such product on CPUs."""
    if not torch_has_it:
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", not_implemented)
    a, b = operands(*per)
    found = product(a, b, dtype)
    assert found.dtype == dtype
    bound = values(a).abs() @ values(b).abs()
    rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    sums = 1e-15 if dtype == torch.float64 else 40 * 2**-24
    assert ((found.double() - values(a) @ values(b)).abs() <= (sums + rounding) * bound).all()


def test_what_cuda_refuses_is_refused_on_every_device() -> None:
    a, b = operands("tensor", "tensor")
    with pytest.raises(ModelError, match="two operands in e5m2, which CUDA does not multiply"):
        product(a, ScaledMatrix(b.data.float().to(E5M2), b.scale), torch.float32)
    with pytest.raises(ModelError, match=r"shapes \[24, 32\] and \[32, 8\] has 8 columns, no multiple of 16"):
        product(a, ScaledMatrix(b.data[:, :8], b.scale), torch.float32)


def test_operands_may_be_stored_in_any_order_and_sums_over_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is given rows, then columns, and a summed dim that is a multiple of 16."""
    a, b = operands("row", "row")
    expected = product(a, b, torch.float32)
    given = []

    def seen(left: Tensor, right: Tensor, *others: object, **named: object) -> Tensor:
        given.append((left.is_contiguous(), right.t().is_contiguous(), left.shape[1] % 16))
        return scaled_mm(left, right, *others, **named)  # type: ignore[arg-type]

    scaled_mm = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", seen)
    by_columns = ScaledMatrix(a.data.t().contiguous().t(), a.scale)
    assert torch.equal(
        product(by_columns, ScaledMatrix(b.data.contiguous(), b.scale), torch.float32), expected
    )
    few = product(ScaledMatrix(a.data[:, :19], a.scale), ScaledMatrix(b.data[:19], b.scale), torch.float32)
    assert given == [(True, True, 0)] * 2
    left, right = values(a)[:, :19], values(b)[:19]
    assert ((few.double() - left @ right).abs() <= 40 * 2**-24 * (left.abs() @ right.abs())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per", [("row", "row"), ("row", "tensor")])
def test_products_by_rows_have_the_same_bits_on_gpus_where_they_are_scaled_afterwards(
    monkeypatch: pytest.MonkeyPatch, per: tuple[str, str], dtype: torch.dtype
) -> None:
    """Scales of rows are powers of two."""
    a, b = (ScaledMatrix(one.data, torch.exp2(torch.floor(torch.log2(one.scale)))) for one in operands(*per))
    expected = product(a, b, dtype)
    monkeypatch.setattr(scaled_product, "is_accelerator", lambda tensor: True)
    assert torch.equal(product(a, b, dtype), expected)
