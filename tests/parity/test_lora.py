"""LoRA under every plan: against one rank, every gradient, and only adapters train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from parity import cases, lora_cases, woven
from parity.case import Case, Recipe
from parity.parity import check_parity, compare
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.verification.case import Case as VerifiedCase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report

QUICK: dict[str, dict[str, Any]] = {
    "regather": {"tp": 2, "pp": 2, "schedule": "zb-v", "sequence_parallel": "regather", "microbatches": 4},
    "contexts": {"tp": 2, "cp": 2, "sequence_parallel": "keep", "recompute": "full", "strategy": "full"},
}
FULL: dict[str, dict[str, Any]] = {
    "everything": {"pp": 2, "tp": 2, "dp": 2, "strategy": "full", "reduce": "each"},
    "tp": {"tp": 2},
    "four": {"tp": 4, "recompute": "selective"},
    "keep": {"tp": 4, "sequence_parallel": "keep", "recompute": "full"},
    "regather-recomputed": {"tp": 2, "sequence_parallel": "regather", "recompute": "selective"},
    "zb-h1": {"pp": 2, "tp": 2, "schedule": "zb-h1", "recompute": "full"},
    "zb-h2": {"pp": 3, "schedule": "zb-h2", "microbatches": 4},
    "cp": {"cp": 2, "pp": 2, "schedule": "zb-h1"},
    "offload": {"dp": 2, "strategy": "full", "offload": "full"},
    "gradients": {"dp": 4, "replicate": 2, "strategy": "gradients", "reduce": "each"},
    "optimizer": {"dp": 2, "tp": 2, "strategy": "optimizer"},
}
PLANS = [
    *(pytest.param(settings, id=name) for name, settings in QUICK.items()),
    *(pytest.param(settings, id=name, marks=pytest.mark.full) for name, settings in FULL.items()),
]
MODELS = [
    lora_cases.LLAMA,
    *(
        pytest.param(case, id=name, marks=pytest.mark.full)
        for name, case in (
            ("gpt2", lora_cases.GPT2),
            ("some", lora_cases.SOME),
            ("untied", lora_cases.UNTIED),
        )
    ),
]


def plan_of(settings: dict[str, Any]) -> Plan:
    return Plan(**{"microbatches": 2, "precision": "fp64", **settings})


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("settings", PLANS)
def test_adapted_models_equal_one_rank(thread_ranks: RankPool, case: Case, settings: dict[str, Any]) -> None:
    check_parity(thread_ranks, case, plan_of(settings))


@pytest.mark.parametrize("settings", PLANS[1:])
def test_dropout_of_adapters_draws_the_same_masks_in_every_layout(
    thread_ranks: RankPool, settings: dict[str, Any]
) -> None:
    plan, case, recipe = plan_of(settings), lora_cases.DROPPING, Recipe(steps=2)
    alone = plan_of({"microbatches": plan.microbatches * plan.dp})
    (expected,) = thread_ranks.run(woven.train, case, alone, recipe, ranks=1)
    compare(thread_ranks.run(woven.train, case, plan, recipe, ranks=plan.world), expected, torch.float64)
    (without,) = thread_ranks.run(woven.train, lora_cases.GPT2, alone, recipe, ranks=1)
    assert without.losses != expected.losses


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "keep", "regather"])
def test_verify_finds_an_adapted_model_with_dropout_equal(thread_ranks: RankPool, mode: Any) -> None:
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(8, torch.Generator().manual_seed(3))
    plan = Plan(pp=2, tp=2, schedule="zb-h1", microbatches=2, sequence_parallel=mode)
    case = VerifiedCase(
        lora_cases.DROPPING.build(), plait.cross_entropy, [(inputs, targets)] * 2, VerifyOptions()
    )
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=plan.world), plan, case.options)
    assert report, report


def without_replicated() -> str:
    """On a rank: what the proof says of rules that leave out the sum of a gradient."""
    model: Any = lora_cases.LLAMA.build()
    model.rules = {name: rule for name, rule in model.rules.items() if rule.kind != "replicated"}
    plan = Plan(tp=2, microbatches=2, precision="fp64")
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(4, torch.Generator().manual_seed(3))
    with pytest.raises(ModelError) as caught:
        engine.forward_backward(inputs, targets)
    return str(caught.value)


def test_an_adapter_without_the_rule_replicated_inside_a_region_is_refused(thread_ranks: RankPool) -> None:
    for text in thread_ranks.run(without_replicated, ranks=2):
        assert "the whole parameter query.down.weight is used inside a region" in text
        assert "give its module the rule replicated" in text
