"""The predicted time and memory of Muon beside those of an optimizer of two moments."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.engine.blueprint import build_blueprint
from plait.errors import PlanError
from plait.estimate.memory.whole_parameter_owners import Moments
from plait.estimate.prediction.prediction import predict
from plait.estimate.prediction.traced_model import TracedModel, traced_model
from plait.estimate.search.plan_space import PlanChoices, divisions
from plait.estimate.search.plan_times_and_bounds import Bounds, PlanSteps
from plait.estimate.time.hardware import load_hardware
from plait.estimate.time.operation_times import AxisTransfer, Network, Product, operation_seconds
from plait.estimate.time.step_times import step_seconds
from plait.estimate.time.whole_parameter_updates import StageOwners, owner_seconds
from plait.optimizers.optimizer_makers import MuonSettings
from plait.optimizers.predicted_owner_work import found_matrices, matrix_work
from plait.plan.plan import Plan

WIDE = nn.Sequential(nn.Embedding(8, 512), nn.Linear(512, 1024), nn.Linear(1024, 512), nn.Linear(512, 8))
"""Two hidden matrices: one for each of two ranks."""


def test_iterations_and_exchanges_take_the_time_of_their_products_and_elements() -> None:
    plan, hardware = Plan(dp=2, precision="bf16", master_precision="fp32"), load_hardware("h100-sxm")
    inputs = torch.zeros(4, 3, dtype=torch.int64)
    muon, other = (predict(WIDE, plan, hardware, rows=4, inputs=inputs, moments=one) for one in ("muon", 1))
    first, second = Product(512, 512, 1024), Product(512, 512, 512)
    third = Product(512, 1024, 512)
    each = sum(operation_seconds(one, hardware, "bf16", 2) for one in (first, second, third))
    assert muon.times.owner_seconds[0] == pytest.approx(5 * each)
    transfer = AxisTransfer("all-to-all", "stage", 2 * 2 * 512 * 1024)
    assert muon.times.owner_seconds[1] == pytest.approx(Network(plan, hardware).seconds(transfer))
    assert other.times.owner_seconds == (0.0, 0.0)
    gained = muon.breakdown["optimizer"] - other.breakdown["optimizer"]
    assert gained > muon.times.owner_seconds[0], "the table's second moment is read and written, too"
    assert muon.step_seconds == pytest.approx(sum(muon.breakdown.values()))


@pytest.mark.parametrize(
    "plan",
    [Plan(dp=2, strategy="full"), pytest.param(Plan(pp=2, microbatches=2), marks=pytest.mark.full)],
    ids=str,
)
def test_memory_of_muon_is_a_moment_of_matrices_two_of_others_and_its_buffers(plan: Plan) -> None:
    model = plait.models.gpt2(layers=2, hidden=32, heads=4, vocab=64, context=8)
    of_none, of_one, of_two, of_muon = (
        [rank.at_peak["optimizer"] for rank in plait.memory(model, plan, moments=moments, device="cpu").ranks]
        for moments in (0, 1, 2, "muon")
    )
    blueprint = build_blueprint(model, plan)
    matrices = matrix_work(blueprint, found_matrices(blueprint, MuonSettings()), MuonSettings())
    work = [sizes for one in matrices for sizes in one.exchanges.values()]
    assert of_none == [0] * plan.pp
    assert sum(one.owned for one in work) == 24 * 32 * 32
    for rank, (one, two, muon) in enumerate(zip(of_one, of_two, of_muon, strict=True)):
        ranks = work[rank * plan.dp : (rank + 1) * plan.dp]
        buffers = 2 * max(each.buffered for each in ranks)
        held = 4 * sum(each.owned for each in ranks) // plan.dp
        assert two - held + buffers == pytest.approx(muon, rel=0.02)
        assert one < muon


CHOICES = PlanChoices(
    schedules=(("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)),
    states=(("none", "last"), ("full", "last"), ("optimizer", "last")),
    recompute=("none",),
)


@cache
def known_model(name: str, moments: Moments) -> TracedModel:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 1,
        "vocab": 64,
        "context": 16,
    }
    more: dict[str, Any] = {"layers": 1, "experts": 3, "top_k": 2, "inner": 256, "vocab": 5000}
    return traced_model(plait.models.llama(**sizes | (more if name == "sparse" else {})), moments=moments)


IN_FP32 = partial(plait.Muon, dtype=torch.float32, ns_steps=9, per_head=True)
ADAFACTOR = partial(plait.Owned, torch.optim.Adafactor)


def check_bounds(random: Random, name: str, ranks: int) -> None:
    """Compare the bounds of a plan that is drawn at random with its prediction."""
    hardware, batch = load_hardware("h100-sxm"), 4
    model = known_model(name, random.choice(("muon", IN_FP32, ADAFACTOR)))
    base = Plan(precision="bf16", master_precision="fp32")
    division = random.choice(divisions(model, ranks, batch, base)[0])
    plan = random.choice([*division.options(base, CHOICES)])
    policy, chunks = random.choice(division.schedules(len(model.kinds), CHOICES))
    chosen, bounds = replace(plan, schedule=policy, chunks=chunks), Bounds(model, hardware, batch)
    found = predict(model, chosen, hardware, rows=batch // plan.dp)
    alike = replace(plan, strategy="none", reduce="last", replicate=1)
    assert bounds.owner_seconds(plan) <= sum(found.times.owner_seconds)
    assert bounds.owner_seconds(alike, exchanges=False) <= found.times.owner_seconds[0]
    for least in (
        bounds.step_seconds(alike, state=False),
        bounds.step_seconds(plan),
        bounds.step_seconds(plan, policy, chunks),
    ):
        assert least <= found.step_seconds
    steps = PlanSteps(bounds)
    seconds = step_seconds(bounds.timer(plan), steps.step(chosen).latest) + steps.owner_seconds(chosen)
    assert seconds == pytest.approx(found.step_seconds, rel=1e-12)
    used = found.peak_memory + hardware.reserved
    assert bounds.memory(replace(plan, replicate=1), gathered=False) <= used
    assert max(bounds.memory(plan), bounds.memory(plan, policy)) <= used


def test_bounds_of_a_search_are_not_above_what_is_predicted_with_owners() -> None:
    for seed in range(2):
        check_bounds(Random(seed), "dense", 1 + seed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dense", "sparse"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bounds_of_many_plans_are_not_above_what_is_predicted_with_owners(name: str, ranks: int) -> None:
    for seed in range(25):
        check_bounds(Random(seed), name, ranks)


def test_the_bound_of_owners_is_their_time_where_work_is_shared_evenly() -> None:
    model, hardware = known_model("dense", "muon"), load_hardware("h100-sxm")
    for plan in (Plan(precision="bf16"), Plan(dp=2, precision="bf16")):
        found = predict(model, plan, hardware, rows=4)
        bound = Bounds(model, hardware, 4 * plan.dp).owner_seconds(plan)
        assert 0.95 <= bound / sum(found.times.owner_seconds) <= 1


def test_the_slowest_owner_has_most_seconds_not_most_multiplications() -> None:
    """Of products of few elements the fixed cost of kernels is what takes time."""
    timer = predict(WIDE, Plan(), "h100-sxm", rows=1, inputs=torch.zeros(1, 3, dtype=torch.int64)).times.timer
    few, many = {(512, 512): 1.0}, {(16, 16): 100.0}
    both = StageOwners([few, many], (0.0, 0.0), iterations=5)
    assert owner_seconds(timer, both)[0] == owner_seconds(timer, both._replace(shapes=[many]))[0]
    assert owner_seconds(timer, both._replace(shapes=[few]))[0] < owner_seconds(timer, both)[0]


def test_an_optimizer_within_owned_takes_the_time_of_its_updates_and_exchanges() -> None:
    plan, hardware = Plan(dp=2, precision="bf16", master_precision="fp32"), load_hardware("h100-sxm")
    inputs = torch.zeros(4, 3, dtype=torch.int64)
    found = predict(WIDE, plan, hardware, rows=4, inputs=inputs, moments=ADAFACTOR).times
    state = 4 * (512 + 1024) + 4  # of a matrix: mean squares of its rows and columns, and a step
    updated = 4 * 4 * 512 * 1024 + 2 * state
    part = hardware.efficiency
    bandwidth = hardware.memory_bandwidth * part.memory * part.optimizer
    assert found.owner_seconds[0] == pytest.approx(updated / bandwidth, rel=0.05), "beside small parameters"
    transfer = AxisTransfer("all-to-all", "stage", 2 * 4 * 512 * 1024)
    assert found.owner_seconds[1] == pytest.approx(Network(plan, hardware).seconds(transfer), rel=0.05)


def test_other_words_than_muon_are_refused() -> None:
    model = plait.models.gpt2(layers=1, hidden=32, heads=4, vocab=64, context=8)
    for call in (plait.memory, predict):
        arguments = (model, Plan()) if call is plait.memory else (model, Plan(), "h100-sxm")
        with pytest.raises(PlanError, match="moments is 'shampoo': give a whole number"):
            call(*arguments, moments="shampoo")
        with pytest.raises(PlanError, match=r"moments is AdamW: .* or plait.Muon, or a partial of it or of"):
            call(*arguments, moments=torch.optim.AdamW)
        with pytest.raises(PlanError, match=r"the optimizer is plait\.Owned without a class"):
            call(*arguments, moments=plait.Owned)


def count(owners: StageOwners) -> float:
    """How many matrices the ranks of a stage orthogonalize together."""
    return sum(sum(counts.values()) for counts in owners.shapes)


def test_stages_of_one_cut_have_the_matrices_of_their_layers() -> None:
    model = plait.models.gpt2(layers=4, hidden=64, heads=4, vocab=64, context=8)
    plan = Plan(pp=2, dp=2, microbatches=2, layers_per_stage=(3, 7), precision="bf16")
    found = predict(model, plan, "h100-sxm", rows=2, moments="muon")
    first, second = found.times.owners
    assert count(first) < count(second)
    turned = predict(model, replace(plan, layers_per_stage=(7, 3)), "h100-sxm", rows=2, moments="muon")
    assert turned.times.owners[0].shapes == second.shapes
