"""Attention sinks over heads and sequences that ranks divide: every gradient, also of the sinks."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.case import Batch, Case
from parity.cases import GPT2_VOCAB
from parity.contexts import packed
from parity.parity import check_parity
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.rules import Rules, column, entrance, partitioned, row, sequence, vocabulary
from plait.verification.case import Case as VerifyCase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report

HIDDEN, HEADS, KEY_HEADS, SIZE, WIDTH = 24, 6, 2, 4, 3
RULES: Rules = {
    "embedding": vocabulary,
    "blocks.*": sequence,
    "blocks.*.norm": entrance,
    "blocks.*.query": column.by("heads"),
    "blocks.*.key": column.by("key_heads"),
    "blocks.*.value": column.by("key_heads"),
    "blocks.*.sinks": partitioned.by("heads"),
    "blocks.*.output": row.by("heads"),
    "head": vocabulary,
}


class Sinks(nn.Module):
    """A score of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(HEADS))


class Attention(nn.Module):
    """Attention with sinks in a residual connection; values are narrower than keys."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.heads, self.key_heads, self.window, self.explicit = HEADS, KEY_HEADS, window, False
        self.norm, self.query = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HEADS * SIZE)
        self.key, self.value = nn.Linear(HIDDEN, KEY_HEADS * SIZE), nn.Linear(HIDDEN, KEY_HEADS * WIDTH)
        self.sinks, self.output = Sinks(), nn.Linear(HEADS * WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key = (one(normed).unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.query, self.key))
        value = self.value(normed).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        attend = by_definition if self.explicit else plait.attention
        mixed = attend(query, key, value, window=self.window, sinks=self.sinks.scores)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result


def by_definition(query: Tensor, key: Tensor, value: Tensor, *, window: int | None, sinks: Tensor) -> Tensor:
    """Softmax over the scores and the sink, which has no value."""
    key, value = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (distance < 0) | (distance >= (window or query.shape[2]))
    scores = (query @ key.mT / math.sqrt(SIZE)).masked_fill(hidden, -math.inf).exp()
    return scores @ value / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None])


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        blocks = nn.Sequential(Attention(None), Attention(3))
        layers = OrderedDict[str, nn.Module](
            embedding=nn.Embedding(GPT2_VOCAB, HIDDEN), blocks=blocks, head=nn.Linear(HIDDEN, GPT2_VOCAB)
        )
        model = nn.Sequential(layers)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.4)
        model.rules = RULES  # type: ignore[assignment]
        return model


def draw(length: int, rows: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(GPT2_VOCAB, (rows, length), generator=generator)
    return tokens, tokens.roll(1, 1)


def explicitly(model: nn.Module, inputs: Any) -> Any:
    for block in model.blocks:  # type: ignore[union-attr]
        block.explicit = True
    return model(inputs)


CASE = Case("sinks", build, partial(draw, 7), reference=explicitly)
CASES = {"whole": CASE, "packed": packed(CASE, 7)}
PLANS: dict[str, dict[str, Any]] = {
    "ring kept": {"cp": 2, "tp": 2, "context_layout": "striped", "sequence_parallel": "keep"},
    "one": {},
    "tp": {"tp": 2, "sequence_parallel": "none", "recompute": "selective"},
    "ring": {"cp": 3, "context_layout": "zigzag", "recompute": "full"},
    "ring split": {"cp": 2, "pp": 2, "schedule": "zb-h1", "context_layout": "contiguous"},
    "ulysses": {"cp": 3, "context_parallel": "ulysses", "dp": 2, "strategy": "full", "reduce": "each"},
    "ulysses kept": {
        **{"cp": 3, "context_parallel": "ulysses", "tp": 2, "context_layout": "contiguous"},
        **{"sequence_parallel": "keep", "recompute": "full"},
    },
    "graphs": {"compile": "graphs", "schedule": "zb-h1", "pp": 2},
    "ring in graphs": {"compile": "graphs", "cp": 2, "tp": 2, "recompute": "full"},
    "ulysses in graphs": {"compile": "graphs", "cp": 2, "context_parallel": "ulysses"},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_runs_with_sinks_equal_a_softmax_with_one_more_score(
    thread_ranks: RankPool, plan: str, case: str
) -> None:
    check_parity(thread_ranks, CASES[case], Plan(**PLANS[plan], microbatches=2, precision="fp64"))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["exact", "float64"])
def test_verify_finds_sinks_equal(thread_ranks: RankPool, mode: Any) -> None:
    plan = Plan(tp=2, cp=2, microbatches=2, context_parallel="ring")
    options = VerifyOptions(mode=mode, steps=1)
    case = VerifyCase(build(), plait.cross_entropy, [draw(7, 4, torch.Generator().manual_seed(3))], options)
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=plan.world), plan, options)
    assert report, report
