from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from sharding_cases import case_of, group_of, two_layers, unit_of
from torch import nn

from parity.kernels import Kernels
from plait.engine.sharding import gradient_norm
from plait.engine.sharding.gradient_norm import scale_to, start_norm
from plait.engine.sharding.unit import Unit
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh

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
    for shard in unit.shard_parameters.values():
        shard.grad.copy_(torch.randn(shard.shape))
    return unit


def units_with_gradients(dtype: torch.dtype) -> list[Unit]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 4) for width in (3, 5, 1)]
    return [with_random_gradients(unit_of(layer, precision=PRECISIONS[dtype])) for layer in layers]


def gradients(units: list[Unit]) -> list[torch.Tensor]:
    return [parameter.grad for unit in units for parameter in unit.shard_parameters.values()]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_the_gradient_norm_and_clipping_equal_torchs(dtype: torch.dtype, error: float) -> None:
    for max_norm, order in product([0.1, 1.0, 1e6], ORDERS):
        require_torchs(dtype, error, max_norm, order)


def require_torchs(dtype: torch.dtype, error: float, max_norm: float, order: float) -> None:
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
def test_a_norm_order_of_zero_negative_or_nan_is_refused(order: float) -> None:
    with pytest.raises(PlanError, match=f"norm_type is {order!r}: give a number above 0, or math.inf"):
        norm_of([], order)


def test_gradients_below_the_maximal_norm_are_not_scaled() -> None:
    units = units_with_gradients(torch.float32)
    before = [grad.clone() for grad in gradients(units)]
    versions = [grad._version for grad in gradients(units)]
    scale_to(units, norm_of(units), 1e6)
    assert all(torch.equal(got, was) for got, was in zip(gradients(units), before, strict=True))
    assert [grad._version for grad in gradients(units)] == versions, "written to, to multiply them by 1"


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_no_unit_is_zero(order: float) -> None:
    norm = norm_of([], order)
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float64, 0.0)


def test_a_nan_norm_leaves_the_gradients_unscaled() -> None:
    for value, order in product([math.nan, math.inf, -math.inf], ORDERS):
        units = units_with_gradients(torch.float32)
        gradients(units)[0][0, 0] = value
        before = [grad.clone() for grad in gradients(units)[1:]]
        norm = norm_of(units, order)
        assert not norm.isfinite()
        scale_to(units, norm, 1.0)
        assert all(torch.equal(got, was) for got, was in zip(gradients(units)[1:], before, strict=True))


def test_discarded_gradients_have_no_norm() -> None:
    units = units_with_gradients(torch.float64)
    for unit in units:
        for parameter in unit.shard_parameters.values():
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


def over_shards(plan: Plan) -> list[tuple[float, float]]:
    """For each order the norm of gradients that are like the parameters, and the norm after clipping to 1."""
    mesh = Mesh(plan)
    units, world = case_of(two_layers(), plan).make_on(mesh).values(), mesh.group("world")
    shards = {name: shard for unit in units for name, shard in unit.shard_parameters.items()}
    counted = [] if mesh.index("replicate") else list(shards)
    found = []
    for order in ORDERS:
        for shard in shards.values():
            shard.grad = shard.detach().clone()
        norm = start_norm(units, counted, world, CPU, order)()
        scale_to(units, norm, 1.0)
        found.append((norm.item(), start_norm(units, counted, world, CPU, order)().item()))
    return found


@pytest.mark.parametrize("plan", [{"dp": 3}, {"dp": 4, "replicate": 2}], ids=str)
def test_gradients_of_shards_count_once_in_the_norm(thread_ranks: Any, plan: dict[str, int]) -> None:
    chosen = Plan(strategy="full", precision="fp64", **plan)
    values = torch.cat([parameter.detach().flatten().double() for parameter in two_layers().parameters()])
    wanted = [torch.linalg.vector_norm(values, order).item() for order in ORDERS]
    for found in thread_ranks.run(over_shards, chosen, ranks=chosen.dp):
        assert [norm for norm, _ in found] == pytest.approx(wanted, rel=1e-12)
        assert [clipped for _, clipped in found] == pytest.approx([1.0] * len(ORDERS), rel=1e-6)


# ── on accelerators: few kernels for all gradients together ──

MANY = 12
"""Layers, each with one flat gradient."""


def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "is_accelerator", lambda where: True)


def many_units(dtype: torch.dtype) -> list[Unit]:
    torch.manual_seed(1)
    widths = [16 * number for number in range(1, MANY + 1)]
    return [with_random_gradients(unit_of(nn.Linear(n, 8), precision=PRECISIONS[dtype])) for n in widths]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_the_norm_on_an_accelerator_is_as_close(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, error: float
) -> None:
    """Also in 16 bits, which `get_total_norm` would round to."""
    units = many_units(dtype)
    expected = [norm_of(units, order).item() for order in ORDERS]
    as_on_accelerators(monkeypatch)
    found = torch.stack([norm_of(units, order) for order in ORDERS])
    assert (found.dtype, found.shape) == (torch.float64, (len(ORDERS),))
    assert found.tolist() == pytest.approx(expected, rel=error)


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_kernels_of_a_norm_do_not_grow_with_the_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, each: int
) -> None:
    """In 16 bits there is one for each; `_foreach_norm` itself runs as many as all their bytes need."""
    units = many_units(dtype)
    with Kernels() as kernels:
        norm_of(units)
    assert 2 * MANY <= kernels.count <= 2 * MANY + 8, "by rows, which a GPU does not need"
    as_on_accelerators(monkeypatch)
    with Kernels() as kernels:
        norm_of(units)
    assert kernels.names["_foreach_norm"] == 1
    assert kernels.count <= 8 + each * MANY


def test_a_nan_norm_on_an_accelerator_is_nan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_accelerators(monkeypatch)
    for value, order in product([math.nan, math.inf], ORDERS):
        units = many_units(torch.float32)
        gradients(units)[5][0] = value
        assert not norm_of(units, order).isfinite()


@pytest.mark.parametrize("order", ORDERS)
def test_empty_shards_on_an_accelerator_add_nothing_to_the_norm(
    monkeypatch: pytest.MonkeyPatch, order: float
) -> None:
    """As of the last rank that shards a small layer."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.empty(0, 4))
    units, empty = many_units(torch.float32), unit_of(layer)
    expected = norm_of(units, order)
    as_on_accelerators(monkeypatch)
    found = norm_of([with_random_gradients(empty), *units], order)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm_of([empty], order) == 0


def test_all_gradients_are_scaled_by_one_operation() -> None:
    units = many_units(torch.float32)
    norm, counts = norm_of(units), []
    for some in (units[:1], units):
        with Kernels() as kernels:
            scale_to(some, norm, 1e-3)
        counts.append(kernels.count)
    assert kernels.names["_foreach_mul_"] == 1
    assert counts[1] == counts[0]
