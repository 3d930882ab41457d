"""A sparse model trains as on one rank, however experts, tokens and their state are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.case import Batch, Case
from parity.pairs import in_quick
from parity.parity import check_parity
from parity.resumed_steps import in_a_rank
from plait.plan import rules
from plait.plan.plan import Plan
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router

LENGTH, WIDTH = 6, 8
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp 2 ep 2": {"dp": 2, "ep": 2},
    "dp 4 ep 2": {"dp": 4, "ep": 2},
    "full": {"dp": 4, "ep": 2, "strategy": "full"},
    "gradients, each": {"dp": 4, "ep": 2, "strategy": "gradients", "reduce": "each", "microbatches": 2},
    "optimizer": {"dp": 2, "ep": 2, "strategy": "optimizer", "pp": 2, "microbatches": 2},
    "hybrid": {"dp": 4, "replicate": 2, "ep": 2, "strategy": "full"},
    "tp 2 ep 1": {"tp": 2},
    "tp 2 ep 2": {"tp": 2, "ep": 2},
    "tp 2 etp 2": {"tp": 2, "etp": 2},
    "tp 2 ep 4": {"tp": 2, "dp": 2, "ep": 4},
    "keep": {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": "keep"},
    "keep, ep 1": {"tp": 2, "sequence_parallel": "keep"},
    "cp 2 ep 2": {"cp": 2, "ep": 2, "strategy": "full"},
    "ep 2 etp 2": {"dp": 4, "ep": 2, "etp": 2, "strategy": "full"},
    "more ranks than experts": {"dp": 4, "ep": 4, "strategy": "full"},
    "edp over tp": {"tp": 4, "ep": 2, "strategy": "full"},
    "edp 3": {"dp": 3, "tp": 2, "ep": 2, "strategy": "full"},
    "masters": {"dp": 2, "ep": 2, "strategy": "optimizer", "offload": "full"},
    "zero bubble": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "microbatches": 4},
    "recompute": {"dp": 2, "ep": 2, "recompute": "full", "strategy": "full"},
    "replicated experts": {"dp": 4, "replicate": 2, "ep": 2},
    "compiled": {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 2, "compile": "graphs"},
}


class Sparse(nn.Module):
    """x + experts(norm(x)), each position by itself."""

    def __init__(self, experts: int = 5, top_k: int = 2) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = Router(WIDTH, experts, top_k)
        self.experts = Experts(WIDTH, 6, experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        _, weights, indices = self.router(rows)
        return x + self.experts(rows, indices, weights).view_as(x)


def build() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sparse(), Sparse(3, 1), nn.Linear(WIDTH, WIDTH))
    model.rules = dict.fromkeys("0123", rules.sequence)  # type: ignore[assignment]
    return model


def draw(rows: int, generator: torch.Generator) -> Batch:
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (rows, LENGTH), generator=generator)


CASE = Case("sparse", build, draw)


@pytest.mark.parametrize("name", PLANS)
def test_a_sparse_model_trains_as_on_one_rank(thread_ranks: Any, name: str) -> None:
    check_parity(thread_ranks, CASE, Plan(precision="fp64", **PLANS[name]))


def test_checkpoints_go_from_any_division_of_experts_to_any_other(thread_ranks: Any, tmp_path: Path) -> None:
    """ep 4 → 1 → ep 2 × etp 2 → pp 2 × ep 2: as in one run on one rank."""
    plans = (
        Plan(dp=4, ep=4, precision="fp64", strategy="full"),
        Plan(precision="fp64"),
        Plan(dp=4, ep=2, etp=2, precision="fp64", strategy="optimizer"),
        Plan(pp=2, dp=2, ep=2, precision="fp64"),
        Plan(tp=2, dp=2, ep=2, precision="fp64", strategy="gradients"),
    )
    alone = in_a_rank(CASE, Plan(precision="fp64"), None, None, range(len(plans)))
    losses, before = list[float](), None
    for number, plan in enumerate(plans):
        after = tmp_path / str(number)
        steps = range(number, number + 1)
        losses += thread_ranks.run(in_a_rank, CASE, plan, before, after, steps, ranks=plan.world)[0]
        before = after
    assert losses == pytest.approx(alone, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "tp 2 ep 4", "compiled"])
def test_verify_finds_it_right(name: str) -> None:
    """The quick run has `zoo/test_correct_runs.py`, whose plans divide experts."""
    model = build().to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(number))
    inputs, targets = draw(8, torch.Generator().manual_seed(0))
    report = plait.verify(model.float(), Plan(**PLANS[name]), inputs.float(), targets, ranks_as="threads")
    assert report.equal, report


def generated(plan: Plan) -> list[list[int]]:
    model = gpt_of_experts()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy, seed=1)
    rows = 4 // plan.dp
    first = engine.mesh.index("dp") * rows
    prompt = torch.randint(32, (4, 5), generator=torch.Generator().manual_seed(0))
    found = engine.generate(prompt[first : first + rows], 8, temperature=0.0, stop=(14, 15, 10))
    return [[*row, *[row[-1]] * (13 - len(row))] for row in found.tolist()]


def gpt_of_experts() -> nn.Module:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "context": 32}
    return plait.models.llama(**sizes, experts=5, top_k=2, inner=8, shared=8)


@pytest.mark.parametrize("strategy", in_quick(("none", "full"), "full"))
def test_ranks_whose_rows_have_ended_go_on_for_experts(thread_ranks: Any, strategy: Any) -> None:
    """Rows end after other numbers of tokens; ranks of `ep` make the same exchanges until all have."""
    alone = generated(Plan(precision="fp64"))
    plan = Plan(dp=4, ep=4, precision="fp64", strategy=strategy)
    found = thread_ranks.run(generated, plan, ranks=4)
    assert [row for rows in found for row in rows] == alone


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "tp 2 ep 4", "zero bubble"])
def test_fifty_steps_of_adamw_are_those_of_one_rank(thread_ranks: Any, name: str) -> None:
    plan = Plan(**{"precision": "fp64", **PLANS[name]})
    alone = in_a_rank(CASE, Plan(precision="fp64"), None, None, range(50))
    losses = thread_ranks.run(in_a_rank, CASE, plan, None, None, range(50), ranks=plan.world)[0]
    assert losses == pytest.approx(alone, rel=1e-12)
