"""A step that fails in the middle, and the next one: as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine import Engine
from plait.errors import RankError
from plait.plan.plan import Plan

HIDDEN, ROWS, MICROBATCHES = 32, 2, 3


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, broken: bool) -> Tensor:
        ctx.broken = broken
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.broken:
            raise ArithmeticError("the backward breaks")
        return gradient, None


class Fragile(nn.Module):
    """Breaks in the forward or the backward of a call, counted from when it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.breaks: tuple[str, int] | None = None
        self.calls: list[None] = []  # a number would count steps

    def forward(self, value: Tensor) -> Tensor:
        now = None if self.breaks is None or self.breaks[1] != len(self.calls) else self.breaks[0]
        self.calls.append(None)
        if now == "forward":
            raise ArithmeticError("the forward breaks")
        return torch.tanh(self.norm(Break.apply(self.linear(value), now == "backward")))  # type: ignore[no-untyped-call]


class Squares:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> float:
        return float(targets.numel())


def engine_of(plan: Plan) -> Engine:
    torch.manual_seed(3)
    model = nn.Sequential(*(Fragile() for _ in range(4)))
    return plait.parallelize(model, plan, plait.Mesh(plan, timeout=20), Squares())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS * MICROBATCHES, HIDDEN)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def tell(engine: Engine, breaks: tuple[str, int] | None, layer: int) -> None:
    for stage in engine._runner.pipeline.stages.values():
        for number, one in enumerate(stage.layers):
            assert isinstance(one.module, Fragile)
            one.module.calls, one.module.breaks = [], breaks if number == layer else None


def trained(plan: Plan, breaks: tuple[str, int] | None, carries: bool) -> list[Tensor]:
    """Gradients and parameters of this rank after a step, one that fails maybe, and one more."""
    engine = engine_of(plan)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    tell(engine, None, 0)
    engine.forward_backward(*batch(0))
    if not carries:
        optimizer.step()
        optimizer.zero_grad()
    if breaks is not None:
        before = [None if p.grad is None else p.grad.clone() for p in engine.parameters()]
        tell(engine, breaks, 1)
        with pytest.raises(ArithmeticError):
            engine.forward_backward(*batch(1))
        for parameter, old in zip(engine.parameters(), before, strict=True):
            assert (parameter.grad is None) == (old is None)
            assert old is None or torch.equal(parameter.grad, old)
        for unit in engine.runtime.units.values():
            for buffer in unit.buffers:
                assert buffer.spec.whole.kept or not buffer.whole.untyped_storage().nbytes()
        tell(engine, None, 0)
    engine.forward_backward(*batch(2))
    gradients = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
    optimizer.step()
    return [*gradients, *(p.detach().clone() for p in engine.parameters())]


@pytest.mark.parametrize("carries", [False, True], ids=["anew", "adds"])
@pytest.mark.parametrize("breaks", [("forward", 1), ("backward", 1)], ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, strategy="none", microbatches=MICROBATCHES),
        Plan(dp=2, strategy="optimizer", microbatches=MICROBATCHES),
        Plan(dp=2, strategy="gradients", reduce="each", microbatches=MICROBATCHES),
        Plan(dp=2, strategy="full", reduce="each", microbatches=MICROBATCHES, offload="parameters"),
        Plan(dp=2, strategy="full", microbatches=MICROBATCHES),
        Plan(dp=4, replicate=2, strategy="full", reduce="each", microbatches=MICROBATCHES),
    ],
    ids=lambda plan: f"{plan.strategy}-{plan.reduce}-{plan.replicate}",
)
def test_a_step_after_a_failed_one_has_the_bits_of_a_run_without_failure(
    thread_ranks: Any, plan: Plan, breaks: Any, carries: bool
) -> None:
    if thread_ranks.completion is not None:
        pytest.skip("on NCCL the process of a failed step ends")
    broken = thread_ranks.run(trained, plan, breaks, carries, ranks=plan.world)
    whole = thread_ranks.run(trained, plan, None, carries, ranks=plan.world)
    for one, other in zip(broken, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fails_alone(plan: Plan) -> str:
    engine = engine_of(plan)
    tell(engine, None, 0)
    engine.forward_backward(*batch(0))
    if engine.mesh.rank == 1:
        tell(engine, ("forward", 1), 1)
    engine.forward_backward(*batch(1))
    return "went on"


@pytest.mark.parametrize("strategy", ["gradients", "full"])
def test_a_rank_that_fails_alone_is_not_waited_for(thread_ranks: Any, strategy: Any) -> None:
    """Its own error is told, and not that of those who wait for it."""
    plan = Plan(dp=2, strategy=strategy, reduce="each", microbatches=MICROBATCHES)
    with pytest.raises(RankError, match="the forward breaks"):
        thread_ranks.run(fails_alone, plan, ranks=2)
