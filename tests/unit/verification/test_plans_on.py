"""Every layout and schedule that a number of ranks allows."""

from __future__ import annotations

from itertools import cycle, islice, product
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from verification_cases import mlp_case, rows_and_classes, run_each

from plait.comm.pool import RankPool
from plait.plan import Plan
from plait.search.schedule import NAMES
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.layouts import Refused, plans_on, run_all
from plait.verification.rank import Outcome
from plait.verification.recipe import Recipe

RANKS = st.integers(1, 16)
WAYS_TO_SHARD = [
    (strategy, reduce, offload)
    for strategy, reduce in (
        ("optimizer", "last"),  # it keeps whole gradients anyway
        ("gradients", "last"),
        ("gradients", "each"),
        ("full", "last"),
        ("full", "each"),
    )
    for offload in ("none", "parameters", "full")
]
PLANS = st.builds(Plan, dp=st.integers(1, 4), microbatches=st.integers(1, 8))


def degrees(plans: tuple[Plan, ...]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys((plan.pp, plan.dp, plan.tp) for plan in plans))


def test_four_ranks_in_their_order() -> None:
    plans = plans_on(4, Plan(microbatches=4), 8)
    assert degrees(plans) == [(4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 1, 4), (1, 2, 2), (1, 4, 1)]
    whole = [plan for plan in plans if plan.strategy == "none"]
    assert [plan.schedule for plan in whole] == list(NAMES) * 6
    assert len(plans) == 6 * len(NAMES) + len(WAYS_TO_SHARD) * (1 + 1 + 2)


@given(RANKS, PLANS)
def test_each_layout_is_sharded_in_every_way(ranks: int, plan: Plan) -> None:
    plans = plans_on(ranks, plan, factorial(64))
    for pp, dp, tp in degrees(plans):
        own = [one for one in plans if (one.pp, one.dp, one.tp) == (pp, dp, tp) and one.strategy != "none"]
        expected = [
            (replicate, *way) for replicate in range(1, dp) if dp % replicate == 0 for way in WAYS_TO_SHARD
        ]
        assert [(one.replicate, one.strategy, one.reduce, one.offload) for one in own] == expected
        assert [one.schedule for one in own] == list(islice(cycle(NAMES), len(own)))
        assert all(one.shards for one in own)


def test_a_strategy_of_the_plans_own_is_not_given_twice() -> None:
    plan = Plan(dp=2, strategy="full", microbatches=4)
    plans = plans_on(2, plan, 8)
    assert plan in plans
    assert len(plans) == len(set(plans))
    shards = [one for one in plans if one.shards]
    assert len(shards) == len(NAMES) + len(WAYS_TO_SHARD) - 1


@given(RANKS, PLANS, st.integers(1, 48))
def test_each_has_all_ranks_and_cuts_the_rows(ranks: int, plan: Plan, rows: int) -> None:
    plans = plans_on(ranks, plan, rows)
    assert len(plans) == len(set(plans))
    for one in plans:
        assert one.world == ranks
        assert rows % (one.dp * one.microbatches) == 0
        assert one.dp * one.microbatches <= max(one.dp, plan.dp * plan.microbatches)


@given(RANKS, PLANS, st.integers(1, 48))
def test_none_is_left_out_but_for_rows_that_do_not_divide(ranks: int, plan: Plan, rows: int) -> None:
    expected = {
        (pp, dp, tp, schedule)
        for pp, dp, tp in product(range(1, ranks + 1), repeat=3)
        if pp * dp * tp == ranks and rows % dp == 0
        for schedule in NAMES
    }
    plans = plans_on(ranks, plan, rows)
    assert {(one.pp, one.dp, one.tp, one.schedule) for one in plans} == expected


@given(RANKS, PLANS)
def test_the_micro_batches_of_the_global_batch_stay_where_they_can(ranks: int, plan: Plan) -> None:
    whole = plan.dp * plan.microbatches
    for one in plans_on(ranks, plan, factorial(64)):
        expected = whole if whole % one.dp == 0 else one.dp * max(1, whole // one.dp)
        assert one.dp * one.microbatches == expected


def test_a_plan_is_one_of_those_on_its_own_ranks() -> None:
    plan = Plan(pp=2, dp=2, tp=2, microbatches=2, schedule="zb-h1", precision="bf16", overlap=True)
    assert plan in plans_on(8, plan, 8)


def test_a_cut_by_hand_and_replicas_stay_only_where_they_fit() -> None:
    plan = Plan(pp=2, dp=4, replicate=2, layers_per_stage=(1, 3))
    for one in plans_on(8, plan, 8):
        assert one.layers_per_stage == ((1, 3) if one.pp == 2 else None)
        if one.strategy == "none":
            assert one.replicate == (2 if one.dp % 2 == 0 else 1)


@pytest.mark.parametrize(("rows", "expected"), [(6, 3), (5, 1), (8, 2), (1, 1)])
def test_fewer_micro_batches_where_the_rows_do_not_divide(rows: int, expected: int) -> None:
    (plan, *_) = plans_on(1, Plan(microbatches=3), rows)
    assert plan.microbatches == expected


def test_plans_that_cannot_be_are_given_with_the_reason() -> None:
    case = mlp_case(steps=1)
    plans = [Plan(schedule="nobody's"), Plan(microbatches=3), Plan(chunks=2), Plan(microbatches=2)]
    one, two, three, four = run_all(case, plans)
    assert isinstance(one, Refused)
    assert one.reason.startswith('there is no schedule policy "nobody\'s": choose one of ')
    assert isinstance(two, Refused)
    assert "4 rows, which do not divide into 3 micro-batches" in two.reason
    assert isinstance(three, Refused)
    assert isinstance(four, Outcome)
    assert four.findings.differences == []


def test_after_a_plan_that_was_refused_the_next_one_runs(rank_pool: RankPool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    case = Case(model, cross_entropy, [rows_and_classes()], Recipe(steps=1))
    plans = [Plan(pp=2), Plan(pp=2, layers_per_stage=(2, 1)), Plan(tp=2), Plan(dp=2)]
    results = rank_pool.run(run_each, case, plans, ranks=2)
    for of_rank in results:
        assert [type(outcome) for outcome in of_rank] == [Outcome, Refused, Refused, Outcome]
    told = [{of_rank[number].reason for of_rank in results} for number in (1, 2)]
    assert [len(reasons) for reasons in told] == [1, 1]
