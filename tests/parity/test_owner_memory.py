"""What `memory` foretells of optimizers of whole parts, against the bytes that are alive in a real step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import plait
from parity.case import Case
from parity.pairs import covering_rows
from parity.test_expert_memory import every_choice, sparse
from parity.test_memory import CONTEXT, GPT2, LLAMA, VOCAB, count_in_a_rank, draw, foretold
from parity.test_owned import Whitened
from plait.estimate.memory.whole_parameter_owners import Moments
from plait.plan.plan import Plan

TOLERANCE = 0.01
"""What is claimed, of the peak and of what is alive between steps."""


def odd() -> torch.nn.Module:
    """Tensors that neither ranks nor owners can divide evenly."""
    return plait.models.gpt2(layers=3, hidden=36, heads=4, vocab=VOCAB, context=CONTEXT)


CASES = {"gpt2": GPT2, "llama": LLAMA, "odd": Case("odd", odd, draw)}
ADAFACTOR = partial(plait.Owned, torch.optim.Adafactor)
MAKERS: dict[str, Any] = {
    "muon": plait.Muon,
    "muon in fp32": partial(plait.Muon, dtype=torch.float32, per_head=True),
    "adafactor": ADAFACTOR,
    "whitened": partial(plait.Owned, Whitened, lr=0.1),  # preconditioners in lists, as of SOAP
    "adamw": partial(plait.Owned, torch.optim.AdamW),
}
FACTORS: dict[str, Any] = {
    "optimizer": tuple(MAKERS),
    "case": tuple(CASES),
    "strategy": ("full", "none", "optimizer", "gradients"),
    "degrees": ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)),
    "precision": ("fp32", "bf16"),
}
"""`degrees`: dp, tp and pp."""
ROWS = covering_rows(FACTORS)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_predicted_memory_of_owners_is_what_ranks_allocate(rank_pool: Any, row: dict[str, Any]) -> None:
    dp, tp, pp = row["degrees"]
    fields = {"strategy": row["strategy"], "precision": row["precision"], "microbatches": 2}
    plan = Plan(dp=dp, tp=tp, pp=pp, **fields)
    check(rank_pool, CASES[row["case"]], plan, MAKERS[row["optimizer"]])


MORE: dict[str, tuple[Case, dict[str, Any], Moments]] = {
    "experts": (sparse(every_choice), {"dp": 2, "ep": 2}, plait.Muon),
    "experts owned": (sparse(every_choice), {"dp": 2, "tp": 2, "ep": 2, "strategy": "full"}, ADAFACTOR),
    "copies": (GPT2, {"dp": 4, "replicate": 2, "strategy": "full", "reduce": "each"}, ADAFACTOR),
    "context": (LLAMA, {"cp": 2, "context_parallel": "ring", "strategy": "full"}, plait.Muon),
    "tied in a v": (GPT2, {"pp": 2, "schedule": "zb-v", "strategy": "optimizer"}, ADAFACTOR),
    "offload": (GPT2, {"dp": 2, "strategy": "full", "offload": "full"}, ADAFACTOR),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_predicted_memory_of_owners_is_what_ranks_allocate_in_other_plans(rank_pool: Any, name: str) -> None:
    case, fields, moments = MORE[name]
    check(rank_pool, case, Plan(microbatches=4, precision="fp32", **fields), moments)


def check(rank_pool: Any, case: Case, plan: Plan, moments: Moments) -> None:
    counted = rank_pool.run(count_in_a_rank, case, plan, moments, ranks=plan.world)
    ranks, _ = foretold(case, plan, moments)
    of_stage = plan.world // plan.pp
    for rank, foreseen in enumerate(ranks):
        alive = counted[rank * of_stage : (rank + 1) * of_stage]
        assert foreseen.at_rest == pytest.approx(max(one.at_rest for one in alive), rel=TOLERANCE)
        assert foreseen.peak == pytest.approx(max(one.peak for one in alive), rel=TOLERANCE)
