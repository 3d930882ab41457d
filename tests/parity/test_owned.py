"""Optimizers of whole parameters under every plan: the same parameters as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import data, lora_cases, models
from parity.case import Case
from parity.cases import case, llama, sparse_llama
from parity.norm import assert_equal
from parity.parity import merged
from parity.rows import name_of
from parity.whole_matrices import BOUND, CASES, ROWS, plan_and_case, train, train_on_one_rank
from parity.woven import global_rows
from plait.engine import Engine
from plait.plan.plan import Plan

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": (1e-6, 1e-3)}
"""Of Adafactor, which makes steps of the noise of gradients that are exactly zero unless `eps` is large."""


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([one for one in model.parameters() if one.requires_grad], **SETTINGS)


def owned_adafactor(engine: Engine) -> torch.optim.Optimizer:
    return plait.Owned(torch.optim.Adafactor, engine, **SETTINGS)


class Whitened(torch.optim.Optimizer):
    """Divides a gradient by the roots of sums of its products over rows and over columns, kept in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                matrix = one.grad.view(len(one), -1) if one.dim() else one.grad.view(1, 1)
                sizes, state = matrix.shape, self.state[one]
                if not state:
                    state |= {"products": [torch.eye(size, dtype=one.dtype) for size in sizes], "seen": []}
                rows, columns = state["products"]
                rows += matrix @ matrix.T
                columns += matrix.T @ matrix
                state["seen"] = [group["step"]]
                update = torch.linalg.solve(rows, matrix) @ torch.linalg.inv(columns)
                one.sub_(update.view(one.shape), alpha=group["lr"] / group["step"] ** 0.5)


def whitened(model: nn.Module) -> torch.optim.Optimizer:
    return Whitened([one for one in model.parameters() if one.requires_grad], lr=0.1)


def owned_whitened(engine: Engine) -> torch.optim.Optimizer:
    return plait.Owned(Whitened, engine, lr=0.1)


def check(
    pool: Any,
    case: Case,
    plan: Plan,
    alone: Callable[[nn.Module], Any] = adafactor,
    owned: Callable[[Engine], Any] = owned_adafactor,
) -> None:
    expected = train_on_one_rank(case, alone, global_rows(plan))
    ranks = pool.run(train, case, plan, owned, ranks=plan.world)
    assert_equal(merged(ranks, "parameters"), expected, BOUND, "the value")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_adafactor_owned_by_ranks_equals_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    plan, case = plan_and_case(row)
    check(thread_ranks, case, plan)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS[3:7], ids=name_of)
def test_an_optimizer_with_lists_of_tensors_equals_one_rank(thread_ranks: Any, row: dict[str, Any]) -> None:
    plan, case = plan_and_case(row)
    check(thread_ranks, case, plan, whitened, owned_whitened)


VARIANTS: dict[str, Any] = {
    "offload": (CASES["gpt2"], {"dp": 2, "strategy": "full", "offload": "full"}),
    "experts": (sparse_llama(), {"dp": 2, "tp": 2, "ep": 2, "strategy": "full"}),
    "lora": (lora_cases.LLAMA, {"tp": 2, "pp": 2}),
    "frozen": (case(models.half_frozen, data.draw_vectors), {"dp": 3, "strategy": "full"}),
    "scalars": (case(models.repeated, data.draw_vectors), {"dp": 3, "strategy": "optimizer", "pp": 2}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_adafactor_owned_by_ranks_equals_one_rank_for_other_models(thread_ranks: Any, name: str) -> None:
    case, fields = VARIANTS[name]
    check(thread_ranks, case, Plan(precision="fp64", **fields))


SOAP_SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "precondition_frequency": 100,
    "max_precondition_dim": 16,
}
"""Its bases come from one decomposition, in float64, of products of full rank: later ones are in float32."""


def soap(model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP([one for one in model.parameters() if one.requires_grad], **SOAP_SETTINGS)


def owned_soap(engine: Engine) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return plait.Owned(SOAP, engine, **SOAP_SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS[1:8], ids=name_of)
def test_soap_owned_by_ranks_equals_one_rank(rank_pool: Any, row: dict[str, Any]) -> None:
    pytest.importorskip("pytorch_optimizer")
    plan, _ = plan_and_case(row)
    check(rank_pool, llama(kv_heads=4, tied=False), plan, soap, owned_soap)
