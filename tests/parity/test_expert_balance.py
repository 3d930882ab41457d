"""Auxiliary losses of routers, loads of experts and corrections of biases are those of one device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from parity.balanced import Outcome, expected, run
from parity.norm import assert_equal
from parity.pairs import covering_rows
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.tensor.experts.balance import Balance

TOLERANCE = 1e-12
SETTINGS = {
    "document": Balance(0.5, 0.01, counts="document"),
    "step": Balance(0.5, 0.01, counts="step"),
    "previous": Balance(0.5, 0.01, counts="previous"),
    "coupled document": Balance(0.5, counts="document", coupled=True),
    "coupled step": Balance(0.5, 0.01, counts="step", coupled=True),
    "coupled previous": Balance(0.5, counts="previous", coupled=True),
    "z-loss alone": Balance(z_weight=0.05),
    "corrected": Balance(0.2, bias_rate=0.05),
    "corrected alone": Balance(bias_rate=0.05),
}
reference = lru_cache(expected)


def compare(found: Outcome, balance: Balance, packed: bool) -> None:
    """All steps of a run with plain PyTorch's."""
    plain = reference(balance, packed)
    for step, gradients in enumerate(plain.gradients):
        assert_equal(found.gradients[step], gradients, TOLERANCE, f"gradients of step {step}")
        for one, other in ((found.tokens, plain.tokens), (found.biases, plain.biases)):
            assert one[step].keys() == other[step].keys()
            assert all(torch.equal(one[step][name], value) for name, value in other[step].items())
        assert_equal(found.losses[step], plain.losses[step], TOLERANCE, f"losses of step {step}")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_of_one_rank_are_those_of_plain_pytorch(thread_ranks: Any, name: str, packed: bool) -> None:
    plan = Plan(microbatches=2, schedule="gpipe")
    (found,) = thread_ranks.run(run, plan, SETTINGS[name], packed, ranks=1)
    compare(found, SETTINGS[name], packed)


PIPELINES: dict[str, dict[str, Any]] = {
    "one stage": {},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
    "interleaved": {"pp": 2, "schedule": "interleaved"},
}
DATA: dict[str, dict[str, Any]] = {
    "one": {},
    "none": {"dp": 2},
    "optimizer": {"dp": 2, "strategy": "optimizer"},
    "gradients": {"dp": 2, "strategy": "gradients", "reduce": "each"},
    "full": {"dp": 2, "strategy": "full"},
    "replicate": {"dp": 4, "replicate": 2, "strategy": "full"},
}
TENSOR: dict[str, dict[str, Any]] = {
    "one": {},
    "whole": {"tp": 2},
    "in parts": {"tp": 2, "sequence_parallel": "keep"},
}


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan of a row, or of the beginning of one."""
    tables = {"pipeline": PIPELINES, "data": DATA, "tensor": TENSOR}
    options = {"cp": 1, "ep": 1, "etp": 1, "microbatches": 1, "recompute": "none"}
    fields = {
        name: value
        for factor, table in tables.items()
        for name, value in table[row.get(factor, next(iter(table)))].items()
    }
    return Plan(
        **fields, **{name: row.get(name, default) for name, default in options.items()}, precision="fp64"
    )


def allowed(row: dict[str, Any]) -> bool:
    """Not what is refused, and at most eight ranks."""
    try:
        plan, balance = plan_of(row), SETTINGS[row.get("name", "document")]
    except PlanError:  # ep and etp divide ranks that later factors may give
        return not {"data", "cp", "tensor"} <= row.keys()
    early = plan.schedule not in ("gpipe",) and plan.microbatches > 1
    return (
        plan.world <= 8
        and not (balance.counts == "step" and balance.weight and early)
        and not (balance.counts == "document" and balance.coupled and plan.pp > 1)
    )


FACTORS: dict[str, list[Any]] = {
    "name": list(SETTINGS),
    "packed": [False, True],
    "pipeline": list(PIPELINES),
    "data": list(DATA),
    "cp": [1, 2],
    "tensor": list(TENSOR),
    "ep": [1, 2],
    "etp": [1, 2],
    "microbatches": [1, 2],
    "recompute": ["none", "selective", "full"],
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=str)
def test_balance_of_any_plan_equals_one_device(thread_ranks: Any, row: dict[str, Any]) -> None:
    plan, balance = plan_of(row), SETTINGS[row["name"]]
    for found in thread_ranks.run(run, plan, balance, row["packed"], ranks=plan.world):
        compare(found, balance, row["packed"])
