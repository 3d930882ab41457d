"""What `memory` foretells of a sparse model, against the bytes that are alive in a real step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations, cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.case import Case
from parity.pairs import in_quick
from parity.test_memory import SIZES, adamw, count_in_a_rank, draw, foretold
from parity.test_memory import TOLERANCE as OF_MOST
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.plan.plan import Plan
from plait.tensor.experts.router import Choose, Router

EXPERTS, TOP_K = 4, 2
TOLERANCE = 0.01
"""What is claimed, of the peak; and of the most that is alive within instructions."""
CLOSE = 0.001
"""Of the peak, at every moment: what optimizers allocate, scalars of a step."""
PLANS: dict[str, dict[str, Any]] = {
    "ep 1": {"dp": 2},
    "alone": {},
    "dp 2 ep 2": {"dp": 2, "ep": 2},
    "full": {"dp": 4, "ep": 2, "strategy": "full"},
    "full, each": {"dp": 4, "ep": 2, "strategy": "full", "reduce": "each"},
    "optimizer": {"dp": 2, "ep": 2, "strategy": "optimizer"},
    "tp 2 ep 2": {"tp": 2, "ep": 2},
    "keep": {"tp": 2, "ep": 2, "sequence_parallel": "keep"},
    "keep, ep 1": {"tp": 2, "sequence_parallel": "keep"},
    "etp 2": {"dp": 2, "etp": 2},
    "ep 2 etp 2": {"dp": 4, "ep": 2, "etp": 2},
    "cp 2 ep 2": {"cp": 2, "ep": 2, "context_parallel": "ring"},
    "pp 2 ep 2": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1"},
    "recompute": {"dp": 2, "ep": 2, "recompute": "full"},
    "selective": {"dp": 2, "ep": 2, "recompute": "selective"},
    "recompute, ep 1": {"recompute": "full"},
    "selective, ep 1": {"recompute": "selective"},
    "bf16": {"dp": 2, "ep": 2, "precision": "bf16"},
    "more ranks than experts": {"dp": 4, "ep": 4, "strategy": "full"},
    "compiled": {"dp": 2, "ep": 2, "compile": "graphs"},
    "compiled, recomputed": {"dp": 2, "ep": 2, "recompute": "full", "compile": "graphs"},
}
IN_FLOAT8: dict[str, dict[str, Any]] = {
    name: {"precision": "bf16", **fields}
    for name, fields in {
        "gathered": {"dp": 2, "ep": 2, "strategy": "full", "linears": "float8"},
        "whole": {"linears": "float8-rowwise-gw"},
        "cut": {"dp": 2, "etp": 2, "linears": "float8-rowwise-gw"},
        "late": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "linears": "float8-rowwise-gw"},
    }.items()
}
UNEVEN = {"more ranks than experts": 3, "optimizer": 5}
"""Plans of models with other numbers of experts, of which the first rank has the most."""


def every_choice(scores: Tensor) -> Tensor:
    """Balanced routing: of each token another choice of `TOP_K` experts, all equally often."""
    if scores.is_meta:  # as each position would choose by itself
        return scores.topk(TOP_K).indices
    tokens, experts = scores.shape
    chosen = [*islice(cycle(combinations(range(experts), TOP_K)), tokens)]
    return torch.tensor(chosen, device=scores.device)


def the_first(scores: Tensor) -> Tensor:
    """All tokens to the same experts."""
    return torch.arange(TOP_K, device=scores.device).expand(len(scores), TOP_K).contiguous()


def routed(choose: Choose, experts: int, **sizes: int) -> nn.Module:
    model: nn.Module = plait.models.llama(
        **{**SIZES, "layers": 1, "inner": 96, **sizes}, experts=experts, top_k=TOP_K, shared=32
    )
    for module in model.modules():
        if isinstance(module, Router):
            module.given = choose
    return model


def sparse(choose: Choose, experts: int = EXPERTS) -> Case:
    # Of two layers: with cp the documents of tokens are not predicted, which take 3.5 KB in any depth. Of one
    # layer's peak that is 0.12 %, of two layers' 0.07 %.
    return Case("sparse", partial(routed, choose, experts, layers=2), draw)


@pytest.mark.parametrize("name", in_quick(PLANS, "dp 2 ep 2"))
def test_predicted_memory_of_a_sparse_model_is_what_ranks_allocate(rank_pool: Any, name: str) -> None:
    check(rank_pool, sparse(every_choice, UNEVEN.get(name, EXPERTS)), PLANS[name])


@pytest.mark.parametrize("name", in_quick(IN_FLOAT8, "whole"))
def test_predicted_memory_of_experts_in_float8_is_what_ranks_allocate(rank_pool: Any, name: str) -> None:
    """Of matrices beside which factors of weights, of which each step makes its own, are small."""
    build = partial(routed, every_choice, EXPERTS, hidden=192, inner=192)
    check(rank_pool, Case("sparse of 192", build, draw), IN_FLOAT8[name], OF_MOST)


def test_plans_that_free_weights_share_no_trace_with_those_that_keep_casts_of_experts() -> None:
    model = routed(every_choice, EXPERTS, hidden=32, inner=32, layers=1)
    keeps = Plan(dp=2, microbatches=2, precision="bf16", linears="float8")
    frees, shared = replace(keeps, strategy="full"), MemoryEstimator(model, rows=4, device="cpu")
    shared.ranks(keeps)
    assert shared.ranks(frees) == MemoryEstimator(model, rows=4, device="cpu").ranks(frees)


def adapted() -> nn.Module:
    return plait.lora(sparse(every_choice).build(), rank=8, targets=("experts.*", "query"))


@pytest.mark.parametrize(
    "name", in_quick(("dp 2 ep 2", "full, each", "recompute", "bf16", "ep 2 etp 2"), "dp 2 ep 2")
)
def test_predicted_memory_of_adapted_experts_is_what_ranks_allocate(rank_pool: Any, name: str) -> None:
    check(rank_pool, Case("adapted", adapted, draw), PLANS[name])


def check(rank_pool: Any, case: Case, fields: dict[str, Any], of_most: float = TOLERANCE) -> None:
    """Each rank's tokens are a multiple of the choices, or nearly."""
    plan, rows = Plan(**{"microbatches": 2, "precision": "fp32", **fields}), 12
    counted = rank_pool.run(count_in_a_rank, case, plan, adamw, rows, ranks=plan.world)
    ranks, moments = foretold(case, plan, 2, rows)
    for rank, foreseen in enumerate(ranks):
        found = counted[rank * plan.world // plan.pp]
        assert foreseen.peak == pytest.approx(found.peak, rel=TOLERANCE)
        assert foreseen.most == pytest.approx(found.most, rel=of_most)
        assert foreseen.at_rest == pytest.approx(found.at_rest, rel=TOLERANCE)
        assert [name for name, _ in moments[rank]] == [name for name, _ in found.after]
        for (moment, held), (_, alive) in zip(moments[rank], found.after, strict=True):
            assert held == pytest.approx(alive, abs=CLOSE * found.peak), f"rank {rank} after {moment}"


@pytest.mark.parametrize(
    "name", in_quick(("dp 2 ep 2", "keep", "ep 2 etp 2", "pp 2 ep 2", "compiled"), "dp 2 ep 2")
)
def test_the_worst_case_is_what_a_rank_with_all_tokens_allocates(rank_pool: Any, name: str) -> None:
    plan = Plan(**{"microbatches": 2, "precision": "fp32", **PLANS[name]})
    case, rows = sparse(the_first), 12
    counted = rank_pool.run(count_in_a_rank, case, plan, adamw, rows, ranks=plan.world)
    ((inputs, targets),) = case.batches(rows, 1, torch.float32)
    foreseen = plait.memory(case.build(), plan, inputs, targets, loss=case.loss, device="cpu")
    assert foreseen.worst == pytest.approx(max(one.most for one in counted), rel=OF_MOST)
    assert foreseen.worst is not None
    assert foreseen.worst > 1.02 * foreseen.most
    assert "went would allocate up to" in str(foreseen).splitlines()[-1]


def test_there_is_no_worst_case_where_each_rank_has_all_experts() -> None:
    for plan in (Plan(dp=2), Plan(dp=2, etp=2)):
        found = plait.memory(sparse(every_choice).build(), plan, rows=2, device="cpu")
        assert found.worst is None
        assert "balanced" in str(found).splitlines()[-1]
