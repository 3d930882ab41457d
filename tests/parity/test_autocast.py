"""`torch.autocast` inside a layer: as PyTorch does it; around a step it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError, PlanError
from plait.plan.layout import shard
from plait.plan.plan import Plan

WIDTH, ROWS = 32, 8


class Casts(nn.Module):
    """Computes in bf16 where autocast says so, and gives fp32 (or does not)."""

    def __init__(self, back: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back = back

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner = self.second(torch.relu(self.first(value)))
        return value + inner.float() + self.table.weight[0] if self.back else inner


class Squares:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> float:
        return float(targets.numel())


def build(back: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Casts(back) for _ in range(2)))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def differences(plan: Plan) -> list[float]:
    """Of each gradient of this rank, relative to the largest number in it."""
    engine = plait.parallelize(build(), plan, plait.Mesh(plan), Squares())
    engine.forward_backward(*batch(engine.mesh.index("dp")))
    model = build()
    for rank in range(plan.dp):
        for inputs, targets in zip(*(part.chunk(plan.microbatches) for part in batch(rank)), strict=True):
            (Squares().total(model(inputs), targets) / (ROWS * WIDTH * plan.dp)).backward()  # type: ignore[no-untyped-call]
    found = []
    for name, parameter in engine.named_parameters():
        whole = model.get_parameter(name).grad
        assert parameter.grad is not None
        assert whole is not None
        expected = shard(whole, engine.layouts[name], engine.mesh.coordinate)
        if expected.numel():
            found.append(float((parameter.grad - expected).abs().max() / whole.abs().max()))
    return found


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, microbatches=2),
        Plan(dp=2, strategy="full", reduce="each", microbatches=2),
        Plan(pp=2, schedule="zb-h1", microbatches=2),
    ],
    ids=["none", "full", "zb-h1"],
)
def test_autocast_inside_a_layer_gives_the_gradients_of_one_rank(thread_ranks: Any, plan: Plan) -> None:
    for found in thread_ranks.run(differences, plan, ranks=plan.world):
        assert found
        assert max(found) < 1e-6, "the same operations, added up in another order"


def runs(back: bool, around: bool) -> None:
    plan = Plan()
    engine = plait.parallelize(build(back), plan, plait.Mesh(plan), Squares())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        engine.forward_backward(*batch(0))


def test_autocast_around_a_step_is_refused() -> None:
    with pytest.raises(PlanError, match="autocast is active around a step"):
        runs(back=True, around=True)


def test_a_layer_whose_output_dtype_depends_on_autocast_is_refused() -> None:
    with pytest.raises(ModelError, match=r"must not depend on .* torch\.autocast"):
        runs(back=False, around=False)
