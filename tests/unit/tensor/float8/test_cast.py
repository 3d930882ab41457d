"""Casts to float8 give the bits of torchao's, and survive zeros, overflow and empty matrices."""

import pytest
import torch

from plait.tensor.float8.cast import cast, factor_of, largest_of
from plait.tensor.float8.recipes import CastFormat

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [
    CastFormat(dtype, per, power)
    for dtype in (E4M3, E5M2)
    for per in ("tensor", "row")
    for power in (False, True)
]


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    """Matrices of ordinary, small, large and zero values."""
    draw = torch.Generator().manual_seed(0)
    ordinary = torch.randn(48, 32, generator=draw)
    rows_apart = ordinary * torch.logspace(-20, 20, 48)[:, None]
    with_zeros = ordinary.clone()
    with_zeros[3], with_zeros[:, 5] = 0, 0
    return [one.to(dtype) for one in (ordinary, rows_apart, with_zeros, ordinary * 1e-13)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_cast_has_the_bits_of_torchao(form: CastFormat, dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    per = ScalingGranularity.TENSORWISE if form.per == "tensor" else ScalingGranularity.AXISWISE
    for matrix in matrices(dtype):
        theirs = hp_tensor_to_float8_dynamic(
            matrix,
            form.dtype,
            None,
            scaling_granularity=per,
            axiswise_dim=dim if form.per == "row" else None,
            round_scales_to_power_of_2=form.power_of_two,
        )
        ours = cast(matrix, form, dim)
        assert torch.equal(ours.data.view(torch.uint8), theirs._data.view(torch.uint8))
        of_zeros = largest_of(matrix, form.per, dim) == 0
        assert torch.equal(ours.scale[~of_zeros], theirs._scale.reciprocal()[~of_zeros])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_zeros_have_scale_1_and_stay_zeros(form: CastFormat) -> None:
    data, scale = cast(torch.zeros(16, 32), form)
    assert torch.equal(scale, torch.ones(() if form.per == "tensor" else (16, 1)))
    assert not data.view(torch.uint8).any()


def test_a_value_beyond_the_given_largest_is_clamped() -> None:
    """So are values whose factor was rounded up, which e5m2 would make infinite."""
    form = CastFormat(E5M2, "tensor")
    data, _ = cast(torch.tensor([[1.0, -8.0]]), form, reduce_largest=lambda largest: largest / 4)
    assert data.float().tolist() == [[28672.0, -57344.0]]


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_the_largest_values_of_parts_make_the_cast_of_the_whole(per: str) -> None:
    (whole, *_), form = matrices(torch.bfloat16), CastFormat(E4M3, per)  # type: ignore[arg-type]
    expected, largest = cast(whole, form), largest_of(whole, form.per)
    parts = [cast(part, form, reduce_largest=lambda _: largest) for part in whole.chunk(2, 1)]
    assert torch.equal(torch.cat([part.data.float() for part in parts], 1), expected.data.float())
    assert all(torch.equal(part.scale, expected.scale) for part in parts)


def test_an_empty_matrix_has_scales_of_1() -> None:
    data, scale = cast(torch.zeros(0, 32), CastFormat(E4M3, "row"), 0)
    assert data.shape == (0, 32)
    assert torch.equal(scale, torch.ones(1, 32))
    assert cast(torch.zeros(0, 32), CastFormat(E4M3, "tensor")).scale == 1


def test_a_factor_is_rounded_down_to_a_power_of_two() -> None:
    form = CastFormat(E4M3, "tensor", power_of_two=True)
    assert [float(factor_of(torch.tensor(largest), form)) for largest in (448.0, 300.0, 224.0, 7.1)] == [
        1.0,
        1.0,
        2.0,
        32.0,
    ]
