"""Muon under every plan: the same parameters as by `torch.optim.Muon` on one rank, both in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import plait
from parity.case import Case
from parity.norm import assert_equal
from parity.parity import merged
from parity.rows import name_of
from parity.whole_matrices import (
    BOUND,
    MUON,
    OTHERS,
    ROWS,
    MuonOnOneRank,
    plan_and_case,
    train,
    train_on_one_rank,
    whole_weights,
)
from parity.woven import global_rows
from plait.engine import Engine
from plait.plan.plan import Plan


def muon(engine: Engine, **options: Any) -> torch.optim.Optimizer:
    return plait.Muon(engine, **MUON, **options, dtype=torch.float64, others=OTHERS)


def check(pool: Any, case: Case, plan: Plan, divide: Any = whole_weights) -> None:
    make = partial(MuonOnOneRank, divide=divide, options=MUON)
    expected = train_on_one_rank(case, make, global_rows(plan))
    ranks = pool.run(train, case, plan, muon, ranks=plan.world)
    assert_equal(merged(ranks, "parameters"), expected, BOUND, "the value")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_muon_equals_torchs_on_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    plan, case = plan_and_case(row)
    check(thread_ranks, case, plan)
