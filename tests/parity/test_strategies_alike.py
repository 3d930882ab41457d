"""Strategies are choices of when, not of what: the same bits come of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity.case import SEED
from parity.cases import gpt2
from plait.plan.layout import assemble
from plait.plan.plan import Plan

CUT = (3, 3)
PROMPT = torch.arange(3)[None]


def everything(plan: Plan) -> dict[str, Any]:
    """Losses, tokens and final parameters of a rank."""
    # A gradient that is tied across ranks of `pp` is summed over all at once, or over `shard` first.
    in_a_v = len(plan.layers_per_stage or ()) > plan.pp
    case = gpt2(layers=2, hidden=32, tied=plan.pp == 1 or in_a_v)
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    optimizer = torch.optim.AdamW(engine.parameter_groups(0.1), lr=0.01, fused=True)
    told: dict[str, Any] = {"losses": [], "evaluated": [], "layouts": dict(engine.layouts)}
    for inputs, targets in case.batches(2 * plan.microbatches * plan.dp, 2, torch.float32):
        rows = 2 * plan.microbatches
        own = slice(engine.mesh.index("dp") * rows, (engine.mesh.index("dp") + 1) * rows)
        told["losses"].append(engine.forward_backward(inputs[own], targets[own]).item())
        told["evaluated"].append(engine.evaluate(inputs[own], targets[own]).item())
        optimizer.step()
        optimizer.zero_grad()
        engine.check_replicas(optimizer)
    told["tokens"] = engine.generate(PROMPT, 6).tolist()
    told["coordinate"] = engine.mesh.coordinate
    told["parameters"] = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return told


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    shards: dict[str, Any] = {}
    for told in ranks:
        for name, tensor in told["parameters"].items():
            place = told["layouts"][name].coordinate(told["coordinate"])
            shards.setdefault(name, {})[place] = tensor
    return {name: assemble(held, ranks[0]["layouts"][name]) for name, held in shards.items()}


@pytest.mark.parametrize(
    ("pp", "tp"), [(1, 1), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 1), (1, 2)))]
)
def test_every_strategy_and_offload_gives_the_same_bits(thread_ranks: Any, pp: int, tp: int) -> None:
    plan = Plan(pp=pp, tp=tp, dp=2, microbatches=2, precision="fp32")
    expected = thread_ranks.run(everything, plan, ranks=plan.world)
    for strategy in ("optimizer", "gradients", "full"):
        for offload in ("none", "parameters", "full") if strategy == "full" else ("none",):
            changed = replace(plan, strategy=strategy, offload=offload)
            ranks = thread_ranks.run(everything, changed, ranks=plan.world)
            for told, wanted in zip(ranks, expected, strict=True):
                for what in ("losses", "evaluated", "tokens"):
                    assert told[what] == wanted[what], (strategy, what)
            ours, theirs = whole(ranks), whole(expected)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), strategy


def check_bits(thread_ranks: Any, plans: Sequence[Plan]) -> None:
    first, *others = (thread_ranks.run(everything, plan, ranks=plan.world) for plan in plans)
    for ranks in others:
        for told, wanted in zip(ranks, first, strict=True):
            assert told["losses"] == wanted["losses"]
            assert all(
                torch.equal(told["parameters"][name], wanted["parameters"][name])
                for name in wanted["parameters"]
            )


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["last", "each"])
def test_schedules_of_sharded_runs_give_the_same_bits(thread_ranks: Any, reduce: Any) -> None:
    plan = Plan(pp=2, dp=2, microbatches=3, strategy="full", reduce=reduce, layers_per_stage=(3, 3))
    check_bits(thread_ranks, [replace(plan, schedule=name) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")])


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"strategy": "full"}, {"strategy": "gradients", "reduce": "each"}])
def test_parameters_tied_between_the_ends_of_a_v_get_the_same_bits_in_every_schedule(
    thread_ranks: Any, settings: dict[str, Any]
) -> None:
    plan = Plan(pp=2, dp=2, microbatches=3, schedule="zb-v", layers_per_stage=(2, 1, 1, 2), **settings)
    check_bits(thread_ranks, [replace(plan, schedule=name) for name in ("zb-v", "v-half", "v-min")])
