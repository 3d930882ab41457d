"""Float8 products of a GPU are those of a CPU, and a run's linears do not make the host wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import plait
from gpu.host_waits import forbid_host_waits
from plait.plan.plan import Plan
from plait.ranks.accelerator import default_device, multiplies_float8
from plait.tensor.experts.grouped_float8_products import grouped_float8_product
from plait.tensor.experts.grouped_products import Groups
from plait.tensor.float8.cast import ScaledMatrix, cast
from plait.tensor.float8.recipes import RECIPES, CastFormat
from plait.tensor.float8.scaled_product import product

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu


def require_float8() -> None:
    if not multiplies_float8(default_device()):
        pytest.skip("this GPU has no products in float8")


def difference(per: Any, dtype: torch.dtype) -> float:
    """The largest, relative to the largest sum of absolute values."""
    require_float8()
    draw, device = torch.Generator().manual_seed(0), default_device()
    rows, columns = torch.randn(72, 80, generator=draw), torch.randn(48, 80, generator=draw)
    a = cast(rows, CastFormat(torch.float8_e5m2, per, True))
    b = cast(columns, CastFormat(torch.float8_e4m3fn, per, True))
    scale = b.scale if per == "tensor" else b.scale.t()
    there = [
        ScaledMatrix(a.data.to(device), a.scale.to(device)),
        ScaledMatrix(b.data.to(device).t(), scale.to(device)),
    ]
    exact = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
    bound = (a.data.double() * a.scale).abs() @ (b.data.double() * b.scale).abs().t()
    return float(((product(*there, dtype).cpu().double() - exact).abs() / bound).max())


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_a_float8_product_is_the_sum_of_the_scaled_values(gpu_ranks: GpuRanks, per: str) -> None:
    for dtype, bound in ((torch.float32, 2e-4), (torch.bfloat16, 2**-8)):
        assert gpu_ranks.run(difference, per, dtype, ranks=1)[0] < bound


def losses_of_experts() -> list[float]:
    """Of four steps."""
    require_float8()
    plan = Plan(linears="float8-rowwise-gw", precision="bf16", microbatches=2)
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "inner": 32, "vocab": 64, "context": 16}
    model = plait.models.llama(**sizes, experts=4, top_k=2)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    assert engine.linear_formats["blocks.0.mlp.mixture.experts"] == "float8-rowwise-gw"
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0)).to(default_device())
    found = list[float]()
    for _ in range(4):
        found.append(float(engine.forward_backward(tokens[:, :-1], tokens[:, 1:])))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_experts_in_float8_learn(gpu_ranks: GpuRanks) -> None:
    (found,) = gpu_ranks.run(losses_of_experts, ranks=1)
    assert found[3] < found[0]


def losses(recipe: Any, compiled: bool) -> list[float]:
    """Of four steps, of which the last two must not make the host wait."""
    require_float8()
    plan = Plan(linears=recipe, precision="bf16", microbatches=2, compile="graphs" if compiled else False)
    model = plait.models.llama(layers=2, hidden=64, heads=4, inner=128, vocab=64, context=16)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0)).to(default_device())
    found = list[Tensor]()
    for step in range(4):
        with forbid_host_waits(engine.mesh.device) if step > 1 else nullcontext():
            found.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
    return [float(one) for one in found]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_a_run_in_float8_learns_without_waits_of_the_host(
    gpu_ranks: GpuRanks, recipe: str, compiled: bool
) -> None:
    (found,) = gpu_ranks.run(losses, recipe, compiled, ranks=1)
    assert found[3] < found[0]


def difference_of_groups(one_scale: bool) -> float:
    """Of products of rows in groups, one of them empty, relative to the sums of absolute values."""
    require_float8()
    draw, device = torch.Generator().manual_seed(0), default_device()
    sizes, scaling = (5, 0, 40, 19), "tensor" if one_scale else "row"
    rows = cast(torch.randn(sum(sizes), 64, generator=draw), CastFormat(torch.float8_e4m3fn, "row", True))
    form = CastFormat(torch.float8_e4m3fn, scaling, True)
    each = [cast(torch.randn(48, 64, generator=draw), form) for _ in sizes]
    data = torch.stack([one.data.t() for one in each])
    scale = torch.stack([one.scale.reshape(1, -1) for one in each])
    ends = torch.tensor(sizes).cumsum(0).int()
    matrices = ScaledMatrix(data.to(device), scale.to(device))
    there = ScaledMatrix(rows.data.to(device), rows.scale.to(device))
    found = (
        grouped_float8_product(there, matrices, Groups.of(sizes, ends.to(device)), torch.bfloat16)
        .cpu()
        .double()
    )
    parts = zip(rows.data.double().split(sizes), rows.scale.double().split(sizes), each, strict=True)
    wide = [(a * scales, one.data.double() * one.scale) for a, scales, one in parts]
    exact, bound = (torch.cat([f(a) @ f(b).t() for a, b in wide]) for f in (torch.clone, torch.abs))
    return float(((found - exact).abs() / bound).max())


@pytest.mark.parametrize("one_scale", [False, True])
def test_a_float8_product_of_groups_is_the_sum_of_the_scaled_values(
    gpu_ranks: GpuRanks, one_scale: bool
) -> None:
    assert gpu_ranks.run(difference_of_groups, one_scale, ranks=1)[0] < 2**-8
