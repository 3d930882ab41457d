"""`fit_plan`: the smallest change of a plan with which it fits into a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple, get_args

from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.plan.parameter_units import timing_of
from plait.plan.plan import Offload, Plan, Strategy


class Change(NamedTuple):
    """A new value for one field of a plan; changes of lower cost are tried first."""

    cost: int
    field: str
    value: Any


def fit_plan(estimator: MemoryEstimator, plan: Plan, limit: int) -> Plan | None:
    """Return the plan with the fewest changes to `plan` whose ranks need at most `limit` bytes, or None.

    `plan` itself, if it fits. Else with one field changed, in this order: gradients reduced each micro-batch;
    the strategies optimizer, gradients, full; more, smaller micro-batches of the same batch; offload of
    parameters, or of all. Then with two fields, and so on. The peak within operations counts.
    """
    rows = estimator.rows_of(plan)
    if estimator.inputs is None:
        estimator = replace(estimator, rows=rows)  # the batch keeps its size, whatever the micro-batches
    for candidate in nearest(plan, rows, offloads=estimator.where.type != "cpu"):
        if max(rank.most for rank in estimator.ranks(candidate)) <= limit:
            return candidate
    return None


def changed_fields(before: Plan, after: Plan) -> dict[str, Any]:
    """Return the fields in which two plans differ, with their values in `after`."""
    values = {field.name: getattr(after, field.name) for field in fields(Plan)}
    return {name: value for name, value in values.items() if value != getattr(before, name)}


def nearest(plan: Plan, rows: int | None, *, offloads: bool) -> Iterator[Plan]:
    """Yield `plan`, then changed plans that may need less memory, those with the fewest changes first.

    `rows`: those of a rank's share of a batch, if known. `offloads`: whether offload frees device memory.
    """
    by_field: dict[str, list[Change | None]] = {}
    for change in _changes(plan, rows, offloads=offloads):
        by_field.setdefault(change.field, [None]).append(change)
    together = [[change for change in row if change is not None] for row in product(*by_field.values())]
    # Few changes come first, then those whose costliest change costs least.
    together.sort(key=lambda row: (len(row), sorted((change.cost for change in row), reverse=True)))
    for changes in together:
        changed = {change.field: change.value for change in changes}
        if _makes_sense(plan, changed):
            yield replace(plan, **changed)


def _changes(plan: Plan, rows: int | None, *, offloads: bool) -> list[Change]:
    """Return every change of one field of `plan` that may save memory, cheapest first."""
    strategies, offload = get_args(Strategy), get_args(Offload)
    found: list[tuple[str, Any]] = []
    if plan.reduce == "last":
        found.append(("reduce", "each"))
    found += (("strategy", one) for one in strategies[strategies.index(plan.strategy) + 1 :])
    count = 2 * plan.microbatches
    while rows is not None and count <= rows and rows % count == 0:
        found.append(("microbatches", count))
        count *= 2
    if offloads:
        found += (("offload", one) for one in offload[offload.index(plan.offload) + 1 :])
    return [Change(cost, field, value) for cost, (field, value) in enumerate(found)]


def _makes_sense(plan: Plan, changed: dict[str, Any]) -> bool:
    """Return whether every changed field has an effect in the changed plan."""
    strategy, offload = changed.get("strategy", plan.strategy), changed.get("offload", plan.offload)
    if "offload" in changed and strategy == "none":
        return False
    if "reduce" in changed and not timing_of(replace(plan, **changed)).allocates:
        return False
    alone = plan.state_ranks == 1 and offload == "none"
    return not (alone and ("strategy" in changed or "reduce" in changed))
