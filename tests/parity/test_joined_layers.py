"""Layers that run in one autograd graph give the bits that each alone gives, as it runs under an observer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from parity import woven
from parity.case import Case, Recipe
from parity.cases import USER_CASES, gpt2, llama
from parity.outcome import Outcome
from plait.engine.pipeline import stage
from plait.plan.plan import Plan

QUICK = ("in_place", "tuples", "half_frozen", "crossing_ties", "unused", "views", "buffers")
"""Of the users' models; the full run has all."""


def trained(case: Case, plan: Plan, observed: bool) -> tuple[Outcome, int]:
    """What two steps of training give, and how many graphs they have run backward."""
    engine, graphs = woven.weave(case, plan), 0
    if observed:
        engine.observe(lambda instruction, runtime: None)

    def counted(roots: Any, seeds: Any) -> None:
        nonlocal graphs
        graphs += 1
        original(roots, seeds)

    original = stage.run_backward
    if plan.world == 1:  # ranks that are threads share the module
        with patch.object(stage, "run_backward", counted):
            return woven.carry_out(Recipe(steps=2), engine, case), graphs
    return woven.carry_out(Recipe(steps=2), engine, case), graphs


def check(thread_ranks: Any, case: Case, plan: Plan) -> list[int]:
    """Compare all ranks' results; return how many graphs the first rank has run, joined and one by one."""
    joined, apart = (thread_ranks.run(trained, case, plan, one, ranks=plan.world) for one in (False, True))
    for (ours, _), (theirs, _) in zip(joined, apart, strict=True):
        assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms)
        for what in ("gradients", "parameters"):
            mine, other = getattr(ours, what), getattr(theirs, what)
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)
    return [joined[0][1], apart[0][1]]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_stage_runs_as_one_graph_but_for_a_last_layer_of_large_outputs(
    thread_ranks: Any, recompute: Any
) -> None:
    plan = Plan(microbatches=2, precision="fp64", recompute=recompute)
    # Two steps of two micro-batches: the head and the others, or each of six layers.
    assert check(thread_ranks, gpt2(layers=2, tied=False), plan) == [8, 24]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.full)
        for one in USER_CASES
    ],
)
def test_users_models_with_joined_layers_train_as_one_rank(thread_ranks: Any, case: Case) -> None:
    check(thread_ranks, case, Plan(microbatches=2, precision="fp64", recompute="selective"))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, microbatches=3, schedule="zb-h1", recompute="full"),
        Plan(pp=2, microbatches=4, schedule="zb-v"),
        Plan(pp=2, dp=2, microbatches=2, strategy="optimizer"),
        pytest.param(Plan(dp=2, microbatches=2, strategy="gradients"), marks=pytest.mark.full),
        pytest.param(Plan(dp=2, microbatches=2, strategy="full", reduce="each"), marks=pytest.mark.full),
    ],
    ids=lambda plan: f"pp{plan.pp}-dp{plan.dp}-cp{plan.cp}-{plan.schedule}-{plan.strategy}-{plan.recompute}",
)
def test_llama_with_joined_layers_trains_as_one_rank_on_every_plan(thread_ranks: Any, plan: Plan) -> None:
    check(thread_ranks, llama(layers=4, tied=plan.pp == 1), replace(plan, precision="fp64"))
