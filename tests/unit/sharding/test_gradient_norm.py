from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sharding_cases import case_of, group_of, two_layers, unit_of
from torch import nn

from plait.comm.mesh import Mesh
from plait.errors import PlanError
from plait.plan import Plan
from plait.sharding.gradient_norm import scale_to, start_norm
from plait.sharding.unit import Unit

CPU = torch.device("cpu")
ALL = ("0.weight", "0.bias")
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
ORDERS = (1.0, 2.0, 3.5, math.inf)


def norm_of(units: list[Unit], order: float = 2.0) -> torch.Tensor:
    return start_norm(units, ALL, group_of(), CPU, order)()


def with_random_gradients(unit: Unit) -> Unit:
    for buffer in unit.trainable:
        buffer.attach_gradients()
        buffer.finish_gradients(None, 1.0)
    for piece in unit.pieces.values():
        piece.grad.copy_(torch.randn(piece.shape))
    return unit


def units_with_gradients(dtype: torch.dtype) -> list[Unit]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 4) for width in (3, 5, 1)]
    return [with_random_gradients(unit_of(layer, precision=PRECISIONS[dtype])) for layer in layers]


def gradients(units: list[Unit]) -> list[torch.Tensor]:
    return [parameter.grad for unit in units for parameter in unit.pieces.values()]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_equals_torch(dtype: torch.dtype, error: float, max_norm: float, order: float) -> None:
    units = units_with_gradients(dtype)
    twins = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients(units)]
    for twin, grad in zip(twins, gradients(units), strict=True):
        twin.grad = grad.clone()
    norm = norm_of(units, order)
    wanted = torch.nn.utils.get_total_norm([twin.grad for twin in twins], order)
    torch.testing.assert_close(norm, wanted.double(), rtol=error, atol=0)
    scale_to(units, norm, max_norm)
    torch.nn.utils.clip_grad_norm_(twins, max_norm, order)
    for got, twin in zip(gradients(units), twins, strict=True):
        torch.testing.assert_close(got, twin.grad, rtol=error, atol=error)


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, math.nan])
def test_other_orders_are_refused(order: float) -> None:
    with pytest.raises(PlanError, match=f"the norm's order is {order!r}: give a number above 0, or float"):
        norm_of([], order)


def test_small_gradients_stay_as_they_are() -> None:
    units = units_with_gradients(torch.float32)
    before = [grad.clone() for grad in gradients(units)]
    scale_to(units, norm_of(units), 1e6)
    assert all(torch.equal(got, was) for got, was in zip(gradients(units), before, strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_no_unit_is_zero(order: float) -> None:
    norm = norm_of([], order)
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float64, 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_no_number_leaves_the_other_gradients(value: float, order: float) -> None:
    units = units_with_gradients(torch.float32)
    gradients(units)[0][0, 0] = value
    before = [grad.clone() for grad in gradients(units)[1:]]
    norm = norm_of(units, order)
    assert not norm.isfinite()
    scale_to(units, norm, 1.0)
    assert all(torch.equal(got, was) for got, was in zip(gradients(units)[1:], before, strict=True))


def test_gradients_that_were_thrown_away_have_no_norm() -> None:
    units = units_with_gradients(torch.float64)
    for unit in units:
        for parameter in unit.pieces.values():
            parameter.grad = None
    assert norm_of(units) == 0


@pytest.mark.parametrize(("order", "error"), [(2.0, 1e-8), (3.0, 1e-6)])
def test_the_norm_of_a_large_layer_keeps_its_digits(order: float, error: float) -> None:
    """Added up in float32 one after the other, two million squares are off by 1e-5 and more."""
    unit = with_random_gradients(unit_of(nn.Linear(1 << 11, 1 << 10, bias=False)))
    (gradient,) = gradients([unit])
    gradient.copy_(torch.linspace(0.1, 1.0, gradient.numel()).view(gradient.shape))
    expected = gradient.double().pow(order).sum().item() ** (1 / order)
    assert norm_of([unit], order).item() == pytest.approx(expected, rel=error)


def over_pieces(plan: Plan) -> list[tuple[float, float]]:
    """For each order the norm of gradients that are like the parameters, and the norm after clipping to 1."""
    mesh = Mesh(plan)
    units, world = case_of(two_layers(), plan).make_on(mesh).values(), mesh.group("world")
    pieces = {name: piece for unit in units for name, piece in unit.pieces.items()}
    counted = [] if mesh.index("replicate") else list(pieces)
    found = []
    for order in ORDERS:
        for piece in pieces.values():
            piece.grad = piece.detach().clone()
        norm = start_norm(units, counted, world, CPU, order)()
        scale_to(units, norm, 1.0)
        found.append((norm.item(), start_norm(units, counted, world, CPU, order)().item()))
    return found


@pytest.mark.parametrize("plan", [{"dp": 3}, {"dp": 4, "replicate": 2}], ids=str)
def test_pieces_count_once(thread_ranks: Any, plan: dict[str, int]) -> None:
    chosen = Plan(strategy="full", precision="fp64", **plan)
    values = torch.cat([parameter.detach().flatten().double() for parameter in two_layers().parameters()])
    wanted = [torch.linalg.vector_norm(values, order).item() for order in ORDERS]
    for found in thread_ranks.run(over_pieces, chosen, ranks=chosen.dp):
        assert [norm for norm, _ in found] == pytest.approx(wanted, rel=1e-12)
        assert [clipped for _, clipped in found] == pytest.approx([1.0] * len(ORDERS), rel=1e-6)
