"""Ranks as threads and as processes: the same bits, along each axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity import woven
from parity.case import Recipe
from parity.cases import llama
from plait.plan.plan import Plan

PLANS = {
    "pp": Plan(pp=2, schedule="zb-v", microbatches=4, precision="fp64"),
    "replicate": Plan(dp=2, precision="fp64"),
    "shard": Plan(dp=2, strategy="full", reduce="each", microbatches=2, precision="fp64"),
    "tp": Plan(tp=2, precision="fp64"),
    "sequence": Plan(tp=2, sequence_parallel="regather", precision="fp64"),
    "all": Plan(pp=2, tp=2, dp=2, strategy="full", schedule="zb-h1", microbatches=2, precision="fp64"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_threads_and_processes_give_the_same_bits(rank_pool: Any, thread_ranks: Any, plan: Plan) -> None:
    both = [
        ranks.run(woven.train, llama(layers=1), plan, Recipe(steps=2), ranks=plan.world)
        for ranks in (thread_ranks, rank_pool)
    ]
    for one, other in zip(*both, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for mine, theirs in ((one.gradients, other.gradients), (one.parameters, other.parameters)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
