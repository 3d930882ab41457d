"""The bounds of a search: never above the prediction of a plan, and where they can be, equal to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from plait.estimate.prediction.predicted_model import DecoderModel
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.search.plan_space import PlanChoices, divisions
from plait.estimate.search.plan_times_and_bounds import Bounds, PlanSteps, pipeline_seconds
from plait.estimate.time.hardware import Hardware, load_hardware
from plait.estimate.time.step_times import step_seconds
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

H100, A100 = load_hardware("h100-sxm"), load_hardware("a100-40")
SLOW_LINKS = replace(A100, devices=2, oversubscription=16.0)
CPU = replace(
    A100,
    overlaps=False,
    multiprocessors=0,
    efficiency=replace(A100.efficiency, operands=0.2, activation=0.2, repetition=3e-4, collective=3e-4),
)
SHARED = replace(CPU, waiting_speedup=1.6)
CHOICES = PlanChoices()


def _random_problem(random: Random) -> tuple[Decoder, Hardware, Plan, int]:
    """Return a model, hardware, a plan and its rows, all drawn at random."""
    heads = random.choice((4, 8))
    gated = random.random() < 0.5
    model = Decoder(
        layers=random.choice((2, 3, 6)),
        hidden=heads * 64,
        heads=heads,
        vocab=random.choice((100, 5000, 60000)),
        context=random.choice((64, 512, 2048)),
        gated=gated,
        rotary=gated,
        biases=not gated,
        tied=random.random() < 0.3,
    )
    batch = random.choice((4, 6, 16))
    division = random.choice(divisions(DecoderModel(model), random.choice((1, 2, 4, 8)), batch, Plan())[0])
    loss_rows, overlap = random.choice((None, 128)), random.choice((None, None, True, False))
    base = Plan(precision="bf16", master_precision="fp32", loss_rows=loss_rows, overlap=overlap)
    plan = random.choice([*division.options(base, CHOICES)])
    policy, chunks = random.choice(division.schedules(len(model.kinds), CHOICES))
    plan = replace(plan, schedule=policy, chunks=chunks)
    return model, random.choice((H100, A100, SLOW_LINKS, CPU, SHARED)), plan, batch


def _bounded(problem: tuple[Decoder, Hardware, Plan, int]) -> tuple[Bounds, Plan, Prediction]:
    model, hardware, plan, batch = problem
    found = predict(model, plan, hardware, rows=batch // plan.dp)
    return Bounds(DecoderModel(model), hardware, batch), plan, found


def _check(seed: int) -> None:
    bounds, plan, found = _bounded(_random_problem(Random(seed)))
    layers = replace(plan, strategy="none", reduce="last", replicate=1)
    assert bounds.step_seconds(layers, state=False) <= found.step_seconds
    assert bounds.step_seconds(plan) <= found.step_seconds
    assert bounds.step_seconds(plan, plan.schedule, plan.chunks or 1) <= found.step_seconds
    steps = PlanSteps(bounds)
    timer = bounds.timer(plan)
    assert step_seconds(timer, steps.step(plan).least) <= found.step_seconds
    assert step_seconds(timer, steps.step(plan).latest) == found.step_seconds
    used = found.peak_memory + bounds.hardware.reserved
    assert bounds.memory(replace(plan, replicate=1), gathered=False) <= used
    assert bounds.memory(plan) <= used
    assert bounds.memory(plan, plan.schedule) <= used
    assert steps.memory(plan) == found.peak_memory
    even = predict(
        bounds.model, _evenly_cut(plan, bounds.model), bounds.hardware, rows=bounds.batch // plan.dp
    )
    assert bounds.memory(plan, plan.schedule) <= even.peak_memory + bounds.hardware.reserved
    assert bounds.step_seconds(plan, plan.schedule, plan.chunks or 1) <= even.step_seconds


def _evenly_cut(plan: Plan, model: Decoder) -> Plan:
    """Return the plan with as many layers on each stage as possible, whatever they cost."""
    layers, stages = len(model.kinds), plan.pp * (plan.chunks or 1)
    cuts = [layers * stage // stages for stage in range(stages + 1)]
    return replace(plan, layers_per_stage=tuple(end - start for start, end in pairwise(cuts)))


def test_after_the_only_micro_batch_no_activations_are_bound() -> None:
    model = replace(EVEN, layers=12, vocab=1000, context=2048)
    plan = Plan(
        pp=2, dp=8, strategy="full", precision="bf16", master_precision="fp32", layers_per_stage=(13, 13)
    )
    found = predict(model, plan, H100, rows=1)
    assert Bounds(DecoderModel(model), H100, 8).memory(plan, "1f1b") <= found.peak_memory + H100.reserved


def test_no_lower_bound_of_a_plan_is_above_its_prediction() -> None:
    for first in range(0, 60, 15):
        for seed in range(first, first + 15):
            _check(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(60, 3000, 60))
def test_no_bound_of_many_plans_is_above_the_prediction(first: int) -> None:
    for seed in range(first, first + 60):
        _check(seed)


EVEN = Decoder(layers=7, hidden=512, heads=8, vocab=8, context=512, gated=True, rotary=True)
"""Sixteen layers, of which the embedding and the head take nearly nothing."""


def _share(plan: Plan, model: Decoder = EVEN, hardware: Hardware = H100, batch: int = 16) -> float:
    """Return the bound of the step time as a part of the prediction."""
    bounds, _, found = _bounded((model, hardware, plan, batch))
    return bounds.step_seconds(plan, plan.schedule, plan.chunks or 1) / found.step_seconds


@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients", "full"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_without_a_pipeline_the_bound_is_the_prediction(strategy: str, recompute: str) -> None:
    plan = Plan(dp=2, tp=2, microbatches=4, strategy=strategy, recompute=recompute, precision="bf16")  # type: ignore[arg-type]
    assert 0.999 < _share(plan) <= 1  # but for sums of gradients that are hidden for all layers but the last


def test_sums_of_gradients_that_nothing_hides_are_in_the_bound() -> None:
    plan = Plan(dp=8, precision="bf16")
    model = replace(EVEN, context=64, vocab=50000)
    assert 0.995 < _share(plan, model, SLOW_LINKS, 8) <= 1


def test_the_optimizer_of_the_rank_with_the_largest_layer_is_in_the_bound() -> None:
    model = replace(EVEN, layers=3, vocab=1_000_000, context=8)
    assert 0.995 < _share(Plan(pp=4, overlap=True), model, H100, 1) <= 1


def test_ranks_of_several_stages_wait_for_the_first_layers() -> None:
    """Without that the bounds are 0.755 and 0.735 of the prediction."""
    for policy, least in [("interleaved", 0.77), ("zb-v", 0.75)]:
        assert least < _share(Plan(pp=4, microbatches=4, schedule=policy, chunks=2)) <= 1


def test_the_bound_of_a_pipeline_of_equal_stages_is_exact() -> None:
    # p equal stages of 1f1b: (m + p − 1) · x with x = total / p, and two messages for each rank.
    plan = Plan(pp=4, microbatches=8)
    assert pipeline_seconds(4.0, plan, 1.0, 0.0) <= 8 + 3
    # x_r grows by 1 / (1 − 1 / m) towards the front; the least time solves all four equations.
    shares = [1.0]
    for _ in range(3):
        shares.append(shares[-1] * (1 - 1 / 8))
    assert pipeline_seconds(4.0, plan, 1.0, 0.0) == pytest.approx(8 * 4 / sum(shares))
    assert pipeline_seconds(4.0, plan, 0.0, 0.0) == pytest.approx(8)
    # The last weight gradient, a third of x_r, is left when the stage before goes on.
    shares = [1.0]
    for _ in range(3):
        shares.append(shares[-1] * (1 - 2 / 3 / (8 - 1 / 3)))
    least = (8 - 1 / 3) * 4 / sum(shares)
    assert pipeline_seconds(4.0, plan, 2 / 3, 0.0, 1 / 3) == pytest.approx(least)
    assert pipeline_seconds(4.0, replace(plan, microbatches=1), 1.0, 0.5) == pytest.approx(4 + 3 * 0.5)


def test_the_bound_of_a_pipeline_is_close_to_its_prediction() -> None:
    for policy, least in [("1f1b", 0.835), ("zb-h1", 0.80), ("interleaved", 0.83)]:
        plan = Plan(pp=4, microbatches=8, schedule=policy, precision="bf16")
        assert least < _share(plan) <= 1


def test_one_micro_batch_takes_the_path_through_stages_and_messages() -> None:
    for policy, chunks, least in [("1f1b", 1, 0.995), ("zb-h1", 1, 0.995), ("zb-v", 2, 0.999)]:
        wide = replace(EVEN, layers=3, context=4096)
        plan = Plan(pp=4, schedule=policy, chunks=chunks, precision="bf16")
        assert least < _share(plan, wide, SLOW_LINKS, 1) <= 1


def test_with_a_known_cut_the_bound_is_close_below_the_predicted_step() -> None:
    for policy, least in [("1f1b", 0.94), ("zb-h1", 0.85), ("zb-v", 0.9)]:
        chunks = 2 if policy == "zb-v" else 1
        plan = Plan(pp=4, microbatches=8, precision="bf16", schedule=policy, chunks=chunks)
        bounds, _, found = _bounded((EVEN, H100, plan, 16))
        known = step_seconds(bounds.timer(plan), PlanSteps(bounds).step(plan).least)
        assert least < known / found.step_seconds <= 1


HEAD = replace(EVEN, vocab=100_000, context=64)
STATE = replace(EVEN, hidden=2048, context=8)
KEPT = replace(EVEN, layers=15, context=2048)


def test_the_bound_of_memory_has_state_activations_and_buffers() -> None:
    for plan, model, least in [
        (Plan(microbatches=16), HEAD, 0.9999),
        (Plan(microbatches=16), KEPT, 0.985),
        (Plan(dp=16, strategy="full", reduce="each"), STATE, 0.999),
        (Plan(dp=16, strategy="full"), HEAD, 0.999),
        (Plan(pp=2, microbatches=16), STATE, 0.95),
        (Plan(pp=8, microbatches=16), HEAD, 0.95),  # the rank of the head
        (Plan(pp=4, microbatches=1), KEPT, 0.68),  # no more micro-batches than there are
        (Plan(pp=4, microbatches=16), KEPT, 0.53),  # all but the last keep several micro-batches
    ]:
        plan = replace(plan, precision="bf16", master_precision="bf16")
        bounds, plan, found = _bounded((model, replace(H100, reserved=0), plan, 16))
        assert least < bounds.memory(plan, plan.schedule) / found.peak_memory <= 1
