from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from plait.comm.mesh import Mesh
from plait.sharding.norm import scale_to, total_norm
from plait.sharding.unit import Unit, build_unit

CPU = torch.device("cpu")
ALL = ("weight", "bias")


def units_with_gradients(dtype: torch.dtype) -> list[Unit]:
    torch.manual_seed(0)
    units = []
    for width in (3, 5, 1):
        parameters = dict(nn.Linear(width, 4).named_parameters())
        unit = build_unit(
            "unit", parameters, lambda name, values=parameters: values[name].detach(), CPU, dtype, {}
        )
        for buffer in unit.trainable:
            buffer.attach_gradients()
        for parameter in unit.parameters.values():
            parameter.grad.copy_(torch.randn(parameter.shape))
        units.append(unit)
    return units


def gradients(units: list[Unit]) -> list[torch.Tensor]:
    return [parameter.grad for unit in units for parameter in unit.parameters.values()]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_equals_torch(dtype: torch.dtype, error: float, max_norm: float) -> None:
    units = units_with_gradients(dtype)
    twins = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients(units)]
    for twin, grad in zip(twins, gradients(units), strict=True):
        twin.grad = grad.clone()
    norm = total_norm(units, ALL, Mesh().group("pp"), CPU)
    wanted = torch.nn.utils.get_total_norm([twin.grad for twin in twins])
    torch.testing.assert_close(norm, wanted.double(), rtol=error, atol=0)
    scale_to(units, norm, max_norm)
    torch.nn.utils.clip_grad_norm_(twins, max_norm)
    for got, twin in zip(gradients(units), twins, strict=True):
        torch.testing.assert_close(got, twin.grad, rtol=error, atol=error)


def test_small_gradients_stay_as_they_are() -> None:
    units = units_with_gradients(torch.float32)
    before = [grad.clone() for grad in gradients(units)]
    scale_to(units, total_norm(units, ALL, Mesh().group("pp"), CPU), 1e6)
    assert all(torch.equal(got, was) for got, was in zip(gradients(units), before, strict=True))


def test_the_norm_of_no_unit_is_zero() -> None:
    norm = total_norm([], ALL, Mesh().group("pp"), CPU)
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float64, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_leaves_the_other_gradients(value: float) -> None:
    units = units_with_gradients(torch.float32)
    gradients(units)[0][0, 0] = value
    before = [grad.clone() for grad in gradients(units)[1:]]
    norm = total_norm(units, ALL, Mesh().group("pp"), CPU)
    assert not norm.isfinite()
    scale_to(units, norm, 1.0)
    assert all(torch.equal(got, was) for got, was in zip(gradients(units)[1:], before, strict=True))


def test_zeroed_gradients_have_no_norm() -> None:
    units = units_with_gradients(torch.float64)
    for unit in units:
        for parameter in unit.parameters.values():
            parameter.grad = None
    assert total_norm(units, ALL, Mesh().group("pp"), CPU) == 0


def test_the_norm_of_a_large_layer_keeps_its_digits() -> None:
    """Added up in float32 one after the other, two million squares are off by 1e-5 and more."""
    layer = nn.Linear(1 << 11, 1 << 10, bias=False)
    unit = build_unit("unit", {"weight": layer.weight}, lambda name: layer.weight.detach(), CPU, None, {})
    for buffer in unit.trainable:
        buffer.attach_gradients()
    gradient = unit.parameters["weight"].grad
    assert gradient is not None
    gradient.copy_(torch.linspace(0.1, 1.0, gradient.numel()).view(gradient.shape))
    expected = gradient.double().square().sum().sqrt().item()
    norm = total_norm([unit], ["weight"], Mesh().group("model"), CPU)
    assert norm.item() == pytest.approx(expected, rel=1e-8)
