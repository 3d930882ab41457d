"""Muon under every plan: the same parameters as by `torch.optim.Muon` on one rank, both in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import plait
from parity.case import Case
from parity.cases import gpt2
from parity.norm import assert_equal
from parity.parity import merged
from parity.whole_matrices import (
    BOUND,
    MUON,
    OTHERS,
    MuonOnOneRank,
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


def test_fully_sharded(thread_ranks: Any) -> None:
    check(thread_ranks, gpt2(), Plan(dp=2, strategy="full", precision="fp64"))
