from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn

import plait
from plait.estimate.memory.fit_plan import changed_fields, fit_plan, nearest
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.plan.plan import Plan
from plait.schedules.search.stage_cuts import schedule_and_cut

ROWS = 8


@cache
def estimator(device: str = "cuda") -> MemoryEstimator:
    """One for all tests: it keeps what it has traced of layers."""
    model = plait.models.gpt2(layers=2, hidden=32, heads=2, vocab=64, context=16)
    return MemoryEstimator(model, rows=ROWS, device=device)


@cache
def most_of(plan: Plan) -> int:
    """Bytes of the rank with the most."""
    return estimator().estimate(plan).most


def changes(plan: Plan, rows: int | None = ROWS, *, offloads: bool = True) -> Iterator[dict[str, object]]:
    return (changed_fields(plan, other) for other in nearest(plan, rows, offloads=offloads))


def test_fit_plan_tries_single_changes_first_and_the_cheapest_before_others() -> None:
    plan = Plan(dp=2, microbatches=2, strategy="gradients")
    found = list(changes(plan))
    assert found[:7] == [
        {},
        {"reduce": "each"},
        {"strategy": "full"},
        {"microbatches": 4},
        {"microbatches": 8},
        {"offload": "parameters"},
        {"offload": "full"},
    ]
    assert [len(change) for change in found] == sorted(len(change) for change in found)
    assert found[-1] == {"reduce": "each", "strategy": "full", "microbatches": 8, "offload": "full"}


def test_fit_plan_tries_only_changes_that_have_an_effect() -> None:
    found = list(changes(Plan(dp=2, microbatches=4)))
    assert found[:5] == [
        {},
        {"strategy": "optimizer"},
        {"strategy": "gradients"},
        {"strategy": "full"},
        {"microbatches": 8},
    ]
    assert {"reduce": "each"} not in found
    assert {"strategy": "optimizer", "reduce": "each"} not in found
    assert {"strategy": "gradients", "reduce": "each"} in found
    assert {"offload": "full"} not in found


def test_fit_plan_for_one_rank_tries_only_more_micro_batches_or_offload() -> None:
    found = list(changes(Plan(microbatches=4)))
    assert found[:2] == [{}, {"microbatches": 8}]
    assert all("offload" in change for change in found[2:])
    assert list(changes(Plan(microbatches=8), offloads=False)) == [{}]


def test_state_is_cut_over_ranks_that_share_sequences() -> None:
    assert list(changes(Plan(cp=2, microbatches=8), offloads=False))[:4] == [
        {},
        {"strategy": "optimizer"},
        {"strategy": "gradients"},
        {"strategy": "full"},
    ]
    plan = Plan(cp=2, microbatches=2)
    found = fit_plan(estimator(), plan, int(most_of(plan) * 0.6))
    assert found is not None
    assert most_of(found) <= most_of(plan) * 0.6


def test_fit_plan_tries_only_micro_batches_that_divide_the_batch() -> None:
    assert {"microbatches": 6} in changes(Plan(microbatches=3), 6)
    assert not any("microbatches" in change for change in changes(Plan(microbatches=4), 6))
    assert not any("microbatches" in change for change in changes(Plan(microbatches=4), None))


@pytest.mark.parametrize(
    "part", [1.0, 0.7, *(pytest.param(part, marks=pytest.mark.full) for part in (0.9, 0.5, 0.3))]
)
def test_fit_plan_gives_the_first_change_that_fits(part: float) -> None:
    plan = Plan(dp=2, microbatches=2)
    limit = int(most_of(plan) * part)
    found = fit_plan(estimator(), plan, limit)
    assert found is not None
    assert most_of(found) <= limit
    for nearer in nearest(plan, ROWS, offloads=True):
        if nearer == found:
            break
        assert most_of(nearer) > limit


def test_fit_plan_returns_a_plan_that_already_fits() -> None:
    plan = Plan(dp=2, microbatches=2)
    assert fit_plan(estimator(), plan, 10**9) is plan or fit_plan(estimator(), plan, 10**9) == plan


def test_plans_that_are_tried_share_the_order_of_a_step() -> None:
    orders: list[object] = []

    def order_of(policy: str, *arguments: Any, **options: Any) -> Any:
        orders.append(options["microbatches"])
        return schedule_and_cut("1f1b", *arguments, **options)  # no search: that takes its time

    given, plan = (
        replace(estimator(), order_of=cache(order_of)),
        Plan(pp=2, dp=2, schedule="auto", microbatches=4),
    )
    assert fit_plan(given, plan, int(given.estimate(plan).most * 0.5)) is not None
    assert sorted(orders) in ([4], [4, 8])


def test_fit_plan_gives_none_where_no_change_fits() -> None:
    assert fit_plan(estimator(), Plan(dp=2, microbatches=2), 1000) is None


def test_fit_plan_does_not_offload_on_a_cpu() -> None:
    given, plan = estimator("cpu"), Plan(dp=2, microbatches=8)
    least = min(given.estimate(other).most for other in nearest(plan, ROWS, offloads=False))
    assert fit_plan(given, plan, least) is not None
    assert fit_plan(given, plan, least - 1) is None


def test_without_a_known_batch_parameters_still_count() -> None:
    given = MemoryEstimator(nn.Sequential(nn.Linear(64, 64)), device="cuda")
    plan = Plan(dp=4)
    found = fit_plan(given, plan, int(given.estimate(plan).most * 0.9))
    assert found is not None
    assert found.strategy == "optimizer"
