"""A wrong bit in what a layer computes is found where the run is drawn, and reruns change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flipped_bits import SIZES, adamw, batch, flip
from torch import Tensor, nn

import plait
from plait.engine import Engine
from plait.engine.corruption.corruption_checks import CorruptionChecks
from plait.errors import CorruptionError, PlanError
from plait.plan.plan import Plan


def model_with_dropout() -> nn.Sequential:
    """Blocks of linears, dropouts and a norm, which draw other masks in each row."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(8))

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 8), block(), block(), nn.Linear(8, 32))


def gpt() -> nn.Sequential:
    return plait.models.gpt2(**SIZES)


def engine_of(plan: Plan, build: Callable[[], nn.Module]) -> Engine:
    return plait.parallelize(build(), plan, plait.Mesh(plan), loss=plait.cross_entropy)


def train(plan: Plan, build: Callable[[], nn.Module], rate: float) -> tuple[int, dict[str, Tensor]]:
    """Train with every run computed again, or none; return how many were, and the parameters."""
    engine = engine_of(plan, build)
    optimizer = adamw(engine)
    with CorruptionChecks(engine, optimizer, recheck_rate=rate) as checks:
        for step in range(4):
            engine.forward_backward(*batch(engine, step))
            if step != 2:  # then gradients add up
                engine.step(optimizer, 1.0)
                optimizer.zero_grad()
        count = checks.rechecked
    return count, engine.state_dict(everywhere=True)


PLANS: dict[str, tuple[Plan, Callable[[], nn.Module], int]] = {
    "replicas": (Plan(dp=2, microbatches=2), gpt, 24),
    "sharded": (Plan(dp=2, strategy="full", microbatches=2), gpt, 48),
    "dropout": (Plan(dp=2, microbatches=2, recompute="full"), model_with_dropout, 16),
    "tensors": (Plan(dp=2, tp=2, microbatches=2, strategy="optimizer", precision="bf16"), gpt, 48),
    "sequences": (Plan(dp=2, tp=2, sequence_parallel="regather", strategy="full"), gpt, 24),
    "zero bubble": (Plan(dp=2, pp=2, microbatches=4, schedule="zb-h1", strategy="gradients"), gpt, 0),
    "chunks": (Plan(dp=2, pp=2, microbatches=4, schedule="zb-v"), gpt, 0),
    "context": (Plan(dp=2, cp=2, recompute="selective"), gpt, 24),
    "hybrid": (Plan(dp=4, replicate=2, strategy="full", reduce="each", microbatches=2), gpt, 48),
    "compiled": (Plan(dp=2, compile="graphs", strategy="gradients"), gpt, 24),
    "offloaded": (Plan(dp=2, strategy="full", offload="full", precision="bf16"), gpt, 24),
    "uneven": (Plan(dp=3, microbatches=2), gpt, 24),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PLANS)
def test_runs_that_are_computed_again_have_the_same_bits_and_change_none(
    thread_ranks: Any, name: str
) -> None:
    plan, build, _ = PLANS[name]
    plain = thread_ranks.run(train, plan, build, 0.0, ranks=plan.world)
    checked = thread_ranks.run(train, plan, build, 1.0, ranks=plan.world)
    for (none, expected), (count, found) in zip(plain, checked, strict=True):
        assert none == 0
        assert count > 0
        assert all(torch.equal(found[key], one) for key, one in expected.items())


def make_faulty(engine: Engine, kind: str, microbatch: int) -> None:
    """Let this rank compute one bit wrongly, once in each step, in its second layer's F, I or W."""
    (stage,) = engine.runtime.pipeline.stages.values()
    runner, backward_weight = stage._training[1], stage.backward_weight
    done: set[int] = set()

    def faulty_runner(number: int, *arguments: Any) -> Any:
        output, run = runner(number, *arguments)
        if number == microbatch and engine.passes not in done:
            done.add(engine.passes)
            if kind == "F":
                flip(output, 5, 2)
            else:
                output.register_hook(wrong)
        return output, run

    def faulty_weights(number: int, layer: int) -> None:
        if number == microbatch and engine.passes not in done and layer <= 1:
            done.add(engine.passes)
            gradient = next(stage.layers[1].module.parameters()).grad
            assert gradient is not None
            stage.work[number, layer].append(partial(flip, gradient, 2, 1))
        backward_weight(number, layer)

    if kind == "W":
        stage.backward_weight = faulty_weights  # type: ignore[method-assign]
    else:
        stage._training = [stage._training[0], faulty_runner, *stage._training[2:]]


def wrong(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    flip(changed, 6, 2)
    return changed


def found_with_a_fault(plan: Plan, kind: str, rate: float, steps: int) -> tuple[list[str], int]:
    """Train on ranks of which the last along dp is faulty; return what this rank has found, and its reruns."""
    engine = engine_of(plan, gpt)
    optimizer, told = adamw(engine), list[str]()
    if engine.mesh.index("dp") == plan.dp - 1 and engine.mesh.index("tp") == 0:
        make_faulty(engine, kind, plan.microbatches - 1)
    with CorruptionChecks(engine, optimizer, memory=False, recheck_rate=rate) as checks:
        for step in range(steps):
            try:
                engine.forward_backward(*batch(engine, step))
            except CorruptionError as error:
                told.append(f"{error.last_good_step} {error}")
                engine.passes += 1
            optimizer.zero_grad()
        return told, checks.rechecked


RESULTS = {
    "F": "the output( and [0-9]+ more results)? of layer",
    "I": "the gradient of the input|the gradient of embedding|the gradient of blocks",
    "W": "the gradient of ",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (Plan(dp=2, microbatches=2), "F"),
        (Plan(dp=2, microbatches=2, strategy="full"), "F"),
        (Plan(dp=2, microbatches=2), "I"),
        (Plan(dp=3, microbatches=2), "W"),
        (Plan(dp=2, microbatches=2, strategy="full", recompute="full"), "I"),
        (Plan(dp=2, tp=2, microbatches=2, strategy="optimizer"), "W"),
    ],
)
def test_a_wrong_bit_of_one_run_is_found_by_the_next_rank(thread_ranks: Any, plan: Plan, kind: str) -> None:
    ranks = thread_ranks.run(found_with_a_fault, plan, kind, 1.0, 2, ranks=plan.world)
    faulty = (plan.dp - 1) * plan.tp
    for rank, (told, _) in enumerate(ranks):
        if rank % plan.tp == 0 and rank // plan.tp == 0:  # checks the last along dp
            assert len(told) == 2
            assert f"rank {rank} on host" in told[0] and f"and rank {faulty} compute" in told[0]
            assert any(one in told[0] for one in RESULTS[kind].split("|")) or kind == "F"
            assert f"micro-batch {plan.microbatches - 1} of step 1, " in told[0]
            assert told[1].startswith("1 ")
        elif plan.tp == 1:
            assert told == []


def test_faults_are_found_at_the_rate_that_is_asked_for(thread_ranks: Any) -> None:
    """60 steps of two micro-batches with a rate of 0.25: of 60 faults 15, and 30 reruns of each stage."""
    plan = Plan(dp=2, microbatches=2)
    (told, rechecked), (other, _) = thread_ranks.run(found_with_a_fault, plan, "F", 0.25, 60, ranks=2)
    assert other == []
    assert 7 <= len(told) <= 24
    assert 0.15 * 120 < rechecked / (rechecked_at_most(plan) / 120) < 0.35 * 120


def rechecked_at_most(plan: Plan) -> int:
    """How many runs 60 steps have: the layers of a stage in as many graphs as they run in."""
    return 60 * plan.microbatches * 4


@pytest.mark.parametrize(
    ("plan", "rate", "told"),
    [
        (Plan(), 0.1, "with plan.dp = 1 no other rank has the same layers"),
        (Plan(), 1.5, "recheck_rate is 1.5: give a share, from 0 to 1."),
        (Plan(), -0.5, "recheck_rate is -0.5: give a number of at least 0."),
    ],
)
def test_rates_that_mean_nothing_are_refused(plan: Plan, rate: float, told: str) -> None:
    engine = engine_of(plan, gpt)
    with pytest.raises(PlanError, match=told):
        CorruptionChecks(engine, adamw(engine), recheck_rate=rate)
    assert engine.watches == []
