"""A Llama with experts trains as on one rank of plain PyTorch, under every way to divide it."""

from __future__ import annotations

from typing import Any

import pytest

from parity.cases import sparse_llama
from parity.parity import check_parity
from plait.plan.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"microbatches": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1", "microbatches": 4},
    "none": {"dp": 2, "strategy": "none", "microbatches": 2},
    "optimizer": {"dp": 2, "strategy": "optimizer"},
    "gradients": {"dp": 2, "strategy": "gradients", "reduce": "each", "microbatches": 2},
    "full": {"dp": 2, "strategy": "full", "microbatches": 2},
    "full, zb-h2": {"pp": 2, "dp": 2, "strategy": "full", "schedule": "zb-h2", "microbatches": 4},
    "tp": {"tp": 2},
    "regather": {"tp": 2, "sequence_parallel": "regather", "pp": 2, "schedule": "zb-h1", "microbatches": 2},
    "keep": {"tp": 2, "sequence_parallel": "keep", "dp": 2, "strategy": "full"},
    "cp": {"cp": 2, "tp": 2},
    "selective": {"recompute": "selective", "pp": 2, "schedule": "zb-h1", "microbatches": 2},
    "recomputed": {"recompute": "full", "dp": 2, "strategy": "full", "microbatches": 2},
    "cp, ep": {"cp": 2, "ep": 2, "dp": 2, "strategy": "optimizer"},
    "ep": {"dp": 2, "ep": 2, "strategy": "full"},
    "tp, ep": {"tp": 2, "dp": 2, "ep": 4, "pp": 2, "schedule": "zb-h1", "microbatches": 2},
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PLANS)
def test_a_sparse_llama_trains_as_on_one_rank(thread_ranks: Any, name: str) -> None:
    check_parity(thread_ranks, sparse_llama(layers=1), Plan(precision="fp64", **PLANS[name]))


@pytest.mark.parametrize(
    ("experts", "top_k", "shared"),
    [(1, 1, 0), (4, 1, 0), (3, 3, 0), (8, 8, 2), (64, 2, 0)],
)
def test_any_number_of_experts_trains_as_on_one_rank(
    thread_ranks: Any, experts: int, top_k: int, shared: int
) -> None:
    """One expert, all experts, and more experts than tokens."""
    case = sparse_llama(layers=1, experts=experts, top_k=top_k, shared=shared)
    plan = Plan(pp=2, dp=2, strategy="full", schedule="zb-h1", microbatches=2, precision="fp64")
    check_parity(thread_ranks, case, plan)
