"""Norms of heads inside regions, capped scores and unequal joined projections, in a model of one's own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.case import Case
from parity.cases import GPT2_VOCAB, draw_contexts
from parity.pairs import in_quick
from parity.parity import check_parity
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.rules import Rules, column, entrance, norm, replicated, row, sequence, vocabulary
from plait.verification.case import Case as VerifyCase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report

HIDDEN, HEADS, KEY_HEADS, SIZE = 24, 4, 2, 6
RULES: Rules = {
    "embedding": vocabulary,
    "block": sequence,
    "block.norm": entrance,
    "block.joined": column.joined("heads", "key_heads", "key_heads"),
    "block.joint": norm.by("heads"),
    "block.each": replicated,
    "block.output": row.by("heads"),
    "head": vocabulary,
}


class Attention(nn.Module):
    """Queries are normalized jointly, keys head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.key_heads = HEADS, KEY_HEADS
        self.norm = nn.RMSNorm(HIDDEN)
        self.joined = nn.Linear(HIDDEN, (HEADS + 2 * KEY_HEADS) * SIZE)
        self.joint, self.each = nn.RMSNorm(HEADS * SIZE, 1e-3), nn.RMSNorm(SIZE)
        self.output = nn.Linear(HEADS * SIZE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        every = self.joined(self.norm(x))
        query, key, value = torch.split(every, [every.shape[-1] // 4 * n for n in (2, 1, 1)], -1)
        heads = [one.unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.joint(query), key, value)]
        mixed = plait.attention(heads[0], self.each(heads[1]), heads[2], softcap=1.5)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        layers = OrderedDict[str, nn.Module](
            embedding=nn.Embedding(GPT2_VOCAB, HIDDEN), block=Attention(), head=nn.Linear(HIDDEN, GPT2_VOCAB)
        )
        model = nn.Sequential(layers)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        model.rules = RULES  # type: ignore[assignment]
        return model


PLANS = {
    "tp": Plan(tp=2, microbatches=2, sequence_parallel="none", precision="fp64"),
    "parts": Plan(
        tp=2, cp=2, dp=2, strategy="full", sequence_parallel="keep", microbatches=2, precision="fp64"
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_norm_over_features_of_all_ranks_has_the_gradients_of_one_rank(
    thread_ranks: RankPool, plan: str
) -> None:
    check_parity(thread_ranks, Case("norms", build, draw_contexts(GPT2_VOCAB)), PLANS[plan])


@pytest.mark.parametrize("mode", in_quick(("exact", "float64"), "exact"))
def test_verify_finds_a_model_with_a_norm_inside_a_region_equal(thread_ranks: RankPool, mode: Any) -> None:
    inputs, targets = draw_contexts(GPT2_VOCAB)(4, torch.Generator().manual_seed(3))
    plan = Plan(tp=2, cp=2, microbatches=2)
    steps = 1 if mode == "exact" else 2
    options = VerifyOptions(mode=mode, steps=steps)
    given = VerifyCase(build(), plait.cross_entropy, [(inputs, targets)] * steps, options)
    report = build_report(thread_ranks.run(verify_rank, given, plan, ranks=4), plan, given.options)
    assert report, report


def whole_parameters(plan: Plan) -> dict[str, Tensor]:
    """On a rank: the whole parameters, gathered from their parts."""
    engine = plait.parallelize(build().double(), plan, plait.Mesh(plan), plait.cross_entropy)
    return engine.state_dict(everywhere=True)


def test_blocks_of_different_sizes_are_gathered(thread_ranks: RankPool) -> None:
    expected = build().double().state_dict()
    for found in thread_ranks.run(whole_parameters, PLANS["parts"], ranks=8):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_rules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="name their parts themselves"):
        column.by("heads").joined("heads", "key_heads")
