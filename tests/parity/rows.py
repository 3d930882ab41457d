"""What a row of factors says about a run: its plan, and its name among a test's parameters."""

from __future__ import annotations

from typing import Any

from parity.pairs import Row
from plait.plan.plan import Plan


def plan_of(row: Row, **others: Any) -> Plan:
    """The plan of a row and of `others`, in float64.

    `model` holds pp and tp, `data` dp and replicate; the other factors are fields of a plan.
    """
    fields = {**row, **others}
    (pp, tp), (dp, replicate) = fields.pop("model"), fields.pop("data")
    return Plan(pp=pp, tp=tp, dp=dp, replicate=replicate, precision="fp64", **fields)


def name_of(row: Row) -> str:
    """The values of its factors."""
    return "-".join(str(value).replace(" ", "") for value in row.values())
