"""The predicted time and memory of Muon beside those of an optimizer of two moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import plait
from plait.engine.blueprint import build_blueprint
from plait.errors import PlanError
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.hardware import load_hardware
from plait.estimate.time.operation_times import AxisTransfer, Network, Product, operation_seconds
from plait.estimate.time.owner_times import StageOwners
from plait.optimizers.made_for_engine import MuonSettings
from plait.optimizers.owner_work import found_matrices, matrix_work
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


@pytest.mark.parametrize("plan", [Plan(dp=2, strategy="full"), Plan(pp=2, microbatches=2)], ids=str)
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


def test_other_words_than_muon_are_refused() -> None:
    model = plait.models.gpt2(layers=1, hidden=32, heads=4, vocab=64, context=8)
    for call in (plait.memory, predict):
        arguments = (model, Plan()) if call is plait.memory else (model, Plan(), "h100-sxm")
        with pytest.raises(PlanError, match="moments is 'shampoo': give a whole number"):
            call(*arguments, moments="shampoo")


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
