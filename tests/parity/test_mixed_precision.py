"""Fewer digits where they are enough: against one process that does the same by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.reference import materialise
from plait.errors import NonFiniteError, PlanError
from plait.plan.layout import assemble
from plait.plan.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HIDDEN, ROWS, MICROBATCHES = 64, 4, 3
LEARNING_RATE = 0.05


class Scaled(nn.Module):
    """A layer with a matrix and vectors, and parameters that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.frozen = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(value) * self.frozen))


class Squares:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.float() - targets.float()).square().sum()

    def weight(self, targets: Tensor) -> float:
        return float(targets.numel())


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(*(Scaled() for _ in range(3)))


def batch(rank: int, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (ROWS * MICROBATCHES, HIDDEN)
    return torch.randn(shape, generator=generator) * magnitude, torch.randn(shape, generator=generator)


def train(plan: Plan, steps: int) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """What the optimizer updates, its gradients after the last step, and layouts, of a rank."""
    engine = plait.parallelize(build(), plan, plait.Mesh(plan), Squares())
    optimizer = torch.optim.SGD(engine.parameters(), lr=LEARNING_RATE, momentum=0.9)
    gradients: dict[str, Tensor] = {}
    for _ in range(steps):
        engine.forward_backward(*batch(engine.mesh.index("dp")))
        engine.clip_grad_norm_(math.inf)
        gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return parameters, gradients, {"layouts": dict(engine.layouts), "coordinate": engine.mesh.coordinate}


def by_hand(plan: Plan, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """fp32 parameters, layers in the plan's precision; gradients added up in fp32, rank by rank."""
    compute, reduce = DTYPES[plan.precision or "fp32"], DTYPES[plan.reduce_precision or "fp32"]
    master = materialise(build(), torch.float32)
    trainable = {name: p for name, p in master.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=LEARNING_RATE, momentum=0.9)
    weight = float(ROWS * MICROBATCHES * HIDDEN * plan.dp)
    totals: dict[str, Tensor] = {}
    for _ in range(steps):
        per_rank = []
        for rank in range(plan.dp):
            sums = {name: torch.zeros(p.shape) for name, p in trainable.items()}
            inputs, targets = batch(rank)
            parts = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
            for input, target in parts:
                layers = materialise(master, compute)
                Squares().total(layers(input.to(compute)), target).div(weight).backward()  # type: ignore[no-untyped-call]
                for name, p in layers.named_parameters():
                    if p.grad is not None:
                        sums[name] += p.grad.float()
            per_rank.append({name: value.to(reduce) for name, value in sums.items()})
        totals = {name: sum(one[name].float() for one in per_rank).to(reduce).float() for name in sums}  # type: ignore[union-attr]
        for name, p in trainable.items():
            p.grad = totals[name]
        optimizer.step()
    return {name: p.detach() for name, p in master.named_parameters()}, totals


def assembled(ranks: list[Any], which: int) -> dict[str, Tensor]:
    """What all ranks gave of a kind, put together."""
    whole = {}
    for name in ranks[0][which]:
        layout = ranks[0][2]["layouts"][name]
        shards = {layout.coordinate(rank[2]["coordinate"]): rank[which][name] for rank in ranks}
        whole[name] = assemble(shards, layout)
    return whole


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("offload", ["none", "full"])
@pytest.mark.parametrize("reduce_precision", [None, "bf16"])
@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients", "full"])
def test_bf16_with_fp32_masters_updates_as_plain_pytorch(
    thread_ranks: Any, strategy: Any, reduce_precision: Any, offload: Any
) -> None:
    if strategy == "none" and offload == "full":
        pytest.skip("nothing is cut, so nothing is offloaded")
    plan = Plan(
        dp=2,
        strategy=strategy,
        microbatches=MICROBATCHES,
        precision="bf16",
        reduce_precision=reduce_precision,
        offload=offload,
    )
    ranks = thread_ranks.run(train, plan, 3, ranks=2)
    parameters, gradients = by_hand(plan, 3)
    for name, whole in assembled(ranks, 1).items():
        assert whole.dtype == torch.float32
        assert relative(whole, gradients[name]) < 1e-6, name
    for name, whole in assembled(ranks, 0).items():
        assert whole.dtype == (torch.bfloat16 if "frozen" in name else torch.float32)
        assert relative(whole, parameters[name]) < 1e-6, name


@pytest.mark.parametrize("strategy", ["none", "optimizer", "full"])
def test_bf16_without_masters_sums_gradients_in_fp32(thread_ranks: Any, strategy: Any) -> None:
    """The first step's gradients; the optimizer then rounds to what parameters are."""
    plan = Plan(
        dp=2,
        strategy=strategy,
        microbatches=MICROBATCHES,
        precision="bf16",
        master_precision="bf16",
        gradient_precision="fp32",
    )
    ranks = thread_ranks.run(train, plan, 1, ranks=2)
    _, gradients = by_hand(plan, 1)
    for name, whole in assembled(ranks, 1).items():
        assert whole.dtype == torch.bfloat16
        assert torch.equal(whole, gradients[name].to(torch.bfloat16)), name


def overflowing(plan: Plan) -> list[tuple[float, float, bool]]:
    """Per step the loss scale, the norm, and whether the optimizer changed anything."""
    engine = plait.parallelize(build(), plan, plait.Mesh(plan), Squares())
    optimizer = torch.optim.AdamW(engine.parameter_groups(0.1), lr=0.01)
    told = []
    for magnitude in (1.0, math.inf, 1.0):
        before = [p.detach().clone() for p in engine.parameters()]
        scale = engine.loss_scale
        inputs, targets = batch(engine.mesh.index("dp"))
        if magnitude == math.inf and engine.mesh.index("dp") == 1:
            targets = targets * 1e6  # only there, and only the gradient overflows
        engine.forward_backward(inputs, targets)
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
        told.append((scale, float(norm), not same))
    return told


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_step_whose_gradients_overflow_is_skipped_on_every_rank(thread_ranks: Any, strategy: Any) -> None:
    plan = Plan(dp=2, strategy=strategy, microbatches=MICROBATCHES, precision="fp16", master_precision="fp32")
    first, second = thread_ranks.run(overflowing, plan, ranks=2)
    assert [(scale, changed) for scale, _, changed in first] == [
        (2.0**16, True),
        (2.0**16, False),
        (2.0**15, True),
    ]
    assert [math.isfinite(norm) for _, norm, _ in first] == [True, False, True]
    assert [changed for _, _, changed in second] == [changed for _, _, changed in first]


def trained(plan: Plan) -> dict[str, Tensor]:
    return train(plan, 2)[1]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_loss_scale_changes_no_gradient(thread_ranks: Any, scale: float) -> None:
    plans = [Plan(dp=2, strategy="gradients", microbatches=MICROBATCHES, loss_scale=s) for s in (None, scale)]
    plain, scaled = (thread_ranks.run(trained, plan, ranks=2) for plan in plans)
    for one, other in zip(plain, scaled, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one), "powers of two scale exactly"


def nobody_looks(plan: Plan) -> None:
    engine = plait.parallelize(build(), plan, plait.Mesh(plan), Squares())
    engine.forward_backward(*batch(0))
    for parameter in engine.parameters():
        parameter.grad = None
    engine.forward_backward(*batch(0))


def test_an_fp16_step_without_clip_grad_norm_is_refused(thread_ranks: Any) -> None:
    plan = Plan(dp=2, strategy="full", microbatches=1, precision="fp16", master_precision="fp32")
    with pytest.raises(PlanError, match="clip_grad_norm_"):
        thread_ranks.run(nobody_looks, plan, ranks=2)


def refuses(plan: Plan) -> None:
    engine = plait.parallelize(build(), plan, plait.Mesh(plan), Squares())
    inputs, targets = batch(0)
    engine.forward_backward(inputs, targets * math.nan if engine.mesh.rank == 1 else targets)
    engine.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_an_error_on_request(thread_ranks: Any) -> None:
    with pytest.raises(NonFiniteError, match="the gradient norm is nan over all ranks"):
        thread_ranks.run(refuses, Plan(dp=2, strategy="full", microbatches=1), ranks=2)
