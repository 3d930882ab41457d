"""A wrong bit in what a layer computes is found where the run is drawn, and reruns change nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from flipped_bits import SIZES, adamw, batch, flip
from torch import Tensor, nn

import plait
from plait.engine import Engine
from plait.engine.corruption.corruption_checks import CorruptionChecks
from plait.engine.corruption.layer_recheck import wrong_ranks
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


PLANS: dict[str, tuple[Plan, Callable[[], nn.Module]]] = {
    "replicas": (Plan(dp=2, microbatches=2), gpt),
    "sharded": (Plan(dp=2, strategy="full", microbatches=2), gpt),
    "dropout": (Plan(dp=2, microbatches=2, recompute="full"), model_with_dropout),
    "sequences": (Plan(dp=2, tp=2, sequence_parallel="regather", strategy="full"), gpt),
    "zero bubble": (Plan(dp=2, pp=2, microbatches=4, schedule="zb-h1", strategy="gradients"), gpt),
    "chunks": (Plan(dp=2, pp=2, microbatches=4, schedule="zb-v"), gpt),
    "context": (Plan(dp=2, cp=2, recompute="selective"), gpt),
    "hybrid": (Plan(dp=4, replicate=2, strategy="full", reduce="each", microbatches=2), gpt),
    "compiled": (Plan(dp=2, compile="graphs", strategy="gradients"), gpt),
    "offloaded": (Plan(dp=2, strategy="full", offload="full", precision="bf16"), gpt),
    "uneven": (Plan(dp=3, microbatches=2), gpt),
    "tensors": (Plan(dp=2, tp=2, microbatches=2, strategy="optimizer", precision="bf16"), gpt),
}


def train_on_documents(plan: Plan, rate: float) -> tuple[int, dict[str, Tensor]]:
    """Train on packed rows whose documents begin elsewhere on each rank and in each micro-batch."""
    engine = engine_of(plan, partial(plait.models.llama, **SIZES))
    optimizer = adamw(engine)
    with CorruptionChecks(engine, optimizer, recheck_rate=rate) as checks:
        for step in range(2):
            tokens, targets = batch(engine, step)
            first = 1 + engine.mesh.index("dp")
            ids = torch.arange(8).expand(4, 8).gt(torch.arange(first, first + 4)[:, None]).long()
            engine.forward_backward({"tokens": tokens, "document_ids": ids}, targets)
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
        count = checks.rechecked
    return count, engine.state_dict(everywhere=True)


@pytest.mark.full
@pytest.mark.parametrize("plan", [Plan(dp=2, microbatches=2), Plan(dp=2, cp=2)])
def test_runs_on_other_documents_have_the_same_bits(thread_ranks: Any, plan: Plan) -> None:
    (none, expected), *_ = thread_ranks.run(train_on_documents, plan, 0.0, ranks=plan.world)
    (count, found), *_ = thread_ranks.run(train_on_documents, plan, 1.0, ranks=plan.world)
    assert none == 0
    assert count > 0
    assert all(torch.equal(found[key], one) for key, one in expected.items())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PLANS)
def test_runs_that_are_computed_again_have_the_same_bits(thread_ranks: Any, name: str) -> None:
    plan, build = PLANS[name]
    plain = thread_ranks.run(train, plan, build, 0.0, ranks=plan.world)
    checked = thread_ranks.run(train, plan, build, 1.0, ranks=plan.world)
    for (none, expected), (count, found) in zip(plain, checked, strict=True):
        assert none == 0
        assert count > 0
        assert all(torch.equal(found[key], one) for key, one in expected.items())


def make_faulty(engine: Engine, kind: str, microbatch: int, runs: Sequence[int]) -> None:
    """Let this rank compute one bit wrongly in its second layer's F, I or W.

    `runs`: of those of a step, from 0 on: the first is the step's own, others are computed again.
    """
    (stage,) = engine.runtime.pipeline.stages.values()
    runner, backward_weight = stage._training[1], stage.backward_weight
    counts = Counter[int]()

    def is_wrong(number: int) -> bool:
        if number != microbatch:
            return False
        counts[engine.passes] += 1
        return counts[engine.passes] - 1 in runs

    def faulty_runner(number: int, *arguments: Any) -> Any:
        output, run = runner(number, *arguments)
        if is_wrong(number) and kind == "F":
            flip(output, 5, 2)
        elif kind == "I" and counts[engine.passes] - 1 in runs and number == microbatch:
            output.register_hook(wrong)
        return output, run

    def faulty_weights(number: int, layer: int) -> None:
        if layer == 1 and is_wrong(number):
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


def told_of(error: CorruptionError) -> str:
    """The last good step and the text, which names the error's ranks."""
    assert error.ranks
    assert all(f"rank {rank} on host" in str(error) for rank in error.ranks)
    return f"{error.last_good_step} {error}"


def found_with_a_fault(
    plan: Plan, kind: str, runs: Sequence[int], rate: float, steps: int
) -> tuple[list[str], int]:
    """Train on ranks of which the last along dp is faulty; return the errors, and the reruns."""
    engine = engine_of(plan, gpt)
    optimizer, told = adamw(engine), list[str]()
    if engine.mesh.index("dp") == plan.dp - 1 and engine.mesh.index("tp") == 0:
        make_faulty(engine, kind, plan.microbatches - 1, runs)
    with CorruptionChecks(engine, optimizer, memory=False, recheck_rate=rate) as checks:
        for step in range(steps):
            try:
                engine.forward_backward(*batch(engine, step))
            except CorruptionError as error:
                told.append(told_of(error))
                engine.passes += 1
            optimizer.zero_grad()
        return told, checks.rechecked


ALWAYS = range(100)
LAYER = "of layer 'blocks.0.attention', micro-batch 1 of step 1, with other bits"


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("plan", "kind", "runs", "expected"),
    [
        (Plan(dp=2, microbatches=2), "F", [0], f"rank 1 on host .* computes the output .*{LAYER}"),
        (Plan(dp=2, microbatches=2, strategy="full"), "F", [0], "rank 1 on host .* computes the output"),
        (Plan(dp=2, microbatches=2), "I", [0], "rank 1 on host .* computes the gradient of "),
        (Plan(dp=3, microbatches=2), "W", ALWAYS, f"rank 2 on host .* computes the gradient of .* {LAYER}"),
        (Plan(dp=2, microbatches=2, strategy="full", recompute="full"), "I", [0], "rank 1 on .* computes"),
        (Plan(dp=2, microbatches=2), "F", [1], "rank 1 on host .* computes a result of layer"),
        (Plan(dp=2, tp=2, microbatches=2, strategy="optimizer"), "W", [0], "rank 2 on .* the gradient of "),
        (Plan(dp=4, microbatches=2), "F", ALWAYS, "rank 3 on host .* computes the output"),
        (
            Plan(dp=2, microbatches=2),
            "F",
            ALWAYS,
            "rank 0 .* and rank 1 .* compute, one of them wrongly, the",
        ),
    ],
)
def test_the_rank_that_computes_a_wrong_bit_is_named_on_all_ranks(
    thread_ranks: Any, plan: Plan, kind: str, runs: Sequence[int], expected: str
) -> None:
    ranks = thread_ranks.run(found_with_a_fault, plan, kind, runs, 1.0, 2, ranks=plan.world)
    for told, _ in ranks:
        first, second = told
        assert re.match(f"0 {expected}", first)
        assert second.startswith("1 ")
        assert "go on from a checkpoint or snapshot of step 1 or before without that device or host" in second


@pytest.mark.parametrize(
    ("original", "votes", "source", "wrong"),
    [
        (7, [5, 5], 0, [0]),  # once, in the step
        (5, [5, 5], 0, [1]),  # once, when it was computed again
        (7, [7, 5], 0, [0, 1]),  # who knows
        (7, [8, 5], 0, [0]),  # each time something else
        (7, [5, 5, 7], 2, [2]),  # each time
        (7, [5, 5, 5], 2, [2]),
        (5, [5, 5, 5, 7], 2, [3]),
        (7, [5, 6, 7], 2, [0, 2]),
        (5, [5, 5, 5], 2, [0]),
    ],
)
def test_what_most_ranks_compute_is_right(
    original: int, votes: Sequence[int], source: int, wrong: Sequence[int]
) -> None:
    assert sorted(wrong_ranks(original, votes, source)) == wrong


def test_faults_are_found_at_the_rate_that_is_asked_for(thread_ranks: Any) -> None:
    """Of 24 faults with a rate of 0.25 some 6 are found, four standard deviations apart at most."""
    plan = Plan(dp=2, microbatches=2)
    (told, rechecked), other = thread_ranks.run(found_with_a_fault, plan, "F", [0], 0.25, 24, ranks=2)
    assert other == (told, rechecked)
    assert 1 <= len(told) <= 14
    every = thread_ranks.run(found_with_a_fault, plan, "F", [], 1.0, 1, ranks=2)[0][1] * 24
    assert abs(rechecked / every - 0.25) < 4 * (0.25 * 0.75 / every) ** 0.5


@pytest.mark.parametrize(
    ("plan", "rate", "told"),
    [
        (Plan(), 0.1, "with plan.dp = 1 no other rank has the same layers"),
        (Plan(), 1.5, "recheck_rate is 1.5: give a share, from 0 to 1."),
        (Plan(), -0.5, "recheck_rate is -0.5: give a number of at least 0."),
    ],
)
def test_rates_that_mean_nothing_are_refused(plan: Plan, rate: float, told: str) -> None:
    """`recheck_rate` outside of 0 to 1, or where no other rank can compute a layer again."""
    engine = engine_of(plan, gpt)
    with pytest.raises(PlanError, match=told):
        CorruptionChecks(engine, adamw(engine), recheck_rate=rate)
    assert engine.watches == []
