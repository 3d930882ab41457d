"""Optimizers of whole parameters under every plan: the same parameters as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity.case import Case
from parity.norm import assert_equal
from parity.parity import merged
from parity.rows import name_of
from parity.whole_matrices import BOUND, ROWS, plan_and_case, train, train_on_one_rank
from parity.woven import global_rows
from plait.engine import Engine
from plait.plan.plan import Plan

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": (1e-6, 1e-3)}
"""Of Adafactor, which makes steps of the noise of gradients that are exactly zero unless `eps` is large."""


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([one for one in model.parameters() if one.requires_grad], **SETTINGS)


def owned_adafactor(engine: Engine) -> torch.optim.Optimizer:
    return plait.Owned(torch.optim.Adafactor, engine, **SETTINGS)


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
