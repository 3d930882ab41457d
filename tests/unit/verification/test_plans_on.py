"""Every layout and schedule that a number of ranks allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice, product
from math import factorial, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from verification_cases import mlp_case, rows_and_classes, run_each

from plait.plan.plan import Plan, Recompute
from plait.ranks.launch.rank_pool import RankPool
from plait.schedules.search.schedule_by_policy import POLICY_NAMES
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome
from plait.verification.sweep import RefusedPlan, plans_on, verify_plans

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
MODES = ("none", "selective", "full")
IN_TURNS = (*MODES, "full")
"""Four, so that a mode meets every kind of offload and every schedule."""
PLANS = st.builds(Plan, dp=st.integers(1, 4), microbatches=st.integers(1, 8))
FEW = settings(max_examples=settings().max_examples // 3)
"""Of what lists thousands of plans each time."""


def degrees(plans: tuple[Plan, ...]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys((plan.pp, plan.dp, plan.tp) for plan in plans))


def test_the_plans_on_four_ranks_are_listed_in_order() -> None:
    plans = plans_on(4, Plan(microbatches=4), 8)
    assert degrees(plans) == [(4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 1, 4), (1, 2, 2), (1, 4, 1)]
    whole = [plan for plan in plans if plan.strategy == "none"]
    ways = [(plan.schedule, plan.recompute) for plan in whole]
    assert ways == [(name, recompute) for name in POLICY_NAMES for recompute in ("none", "full")] * 6
    assert len(plans) == 6 * 2 * len(POLICY_NAMES) + len(WAYS_TO_SHARD) * (1 + 1 + 2)


@given(RANKS, PLANS)
def test_each_layout_is_sharded_in_every_way(ranks: int, plan: Plan) -> None:
    plans = plans_on(ranks, plan, factorial(64))
    for pp, dp, tp in degrees(plans):
        own = [one for one in plans if (one.pp, one.dp, one.tp) == (pp, dp, tp) and one.strategy != "none"]
        expected = [
            (replicate, *way) for replicate in range(1, dp) if dp % replicate == 0 for way in WAYS_TO_SHARD
        ]
        assert [(one.replicate, one.strategy, one.reduce, one.offload) for one in own] == expected
        assert [one.schedule for one in own] == list(islice(cycle(POLICY_NAMES), len(own)))
        assert [one.recompute for one in own] == list(islice(cycle(IN_TURNS), len(own)))
        assert all(one.shards for one in own)


def test_each_layout_computes_its_loss_in_chunks_once() -> None:
    plain, more = plans_on(4, Plan(microbatches=4), 8), plans_on(4, Plan(microbatches=4), 8, in_chunks=True)
    added = [one for one in more if one not in plain]
    assert degrees(tuple(added)) == degrees(plain)
    assert [one.loss_rows for one in added] == [5] * 6
    assert len({(one.schedule, one.recompute) for one in added}) == 6
    given = Plan(microbatches=4, loss_rows=2)
    assert plans_on(4, given, 8, in_chunks=True) == plans_on(4, given, 8)


def test_every_strategy_and_every_offload_meet_every_mode() -> None:
    shards = [one for one in plans_on(2, Plan(), 8) if one.shards]
    for values in (
        {(one.strategy, one.recompute) for one in shards},
        {(one.offload, one.recompute) for one in shards},
    ):
        assert len(values) == 3 * len(MODES)


def test_a_strategy_of_the_plans_own_is_not_given_twice() -> None:
    plan = Plan(dp=2, strategy="full", recompute="full", microbatches=4)
    plans = plans_on(2, plan, 8)
    assert replace(plan, schedule="gpipe") in plans  # the tenth way to shard is run so too
    assert len(plans) == len(set(plans))
    shards = [one for one in plans if one.shards]
    assert len(shards) == len(POLICY_NAMES) + len(WAYS_TO_SHARD) - 1


@pytest.mark.parametrize("recompute", ["selective", "full", ("none", "full")], ids=str)
def test_verify_all_keeps_the_plans_recomputation(recompute: Recompute | tuple[Recompute, ...]) -> None:
    plans = plans_on(2, Plan(microbatches=4, recompute=recompute), 8)
    assert {one.recompute for one in plans} == {recompute}
    assert len(plans) == 3 * len(POLICY_NAMES) + len(WAYS_TO_SHARD)


@given(RANKS, PLANS, st.integers(1, 48))
def test_each_plan_of_verify_all_uses_all_ranks_and_divides_the_rows(
    ranks: int, plan: Plan, rows: int
) -> None:
    plans = plans_on(ranks, plan, rows)
    assert len(plans) == len(set(plans))
    for one in plans:
        assert one.world == ranks
        assert rows % (one.dp * one.microbatches) == 0
        assert one.dp * one.microbatches <= max(one.dp, plan.dp * plan.microbatches)


@given(RANKS, PLANS, st.integers(1, 48))
def test_verify_all_has_every_layout_and_schedule_whose_rows_divide(
    ranks: int, plan: Plan, rows: int
) -> None:
    expected = {
        (pp, dp, tp, schedule)
        for pp, dp, tp in product(range(1, ranks + 1), repeat=3)
        if pp * dp * tp == ranks and rows % dp == 0
        for schedule in POLICY_NAMES
    }
    plans = plans_on(ranks, plan, rows)
    assert {(one.pp, one.dp, one.tp, one.schedule) for one in plans} == expected


@given(RANKS, PLANS)
def test_the_micro_batches_of_the_global_batch_stay_where_they_can(ranks: int, plan: Plan) -> None:
    whole = plan.dp * plan.microbatches
    for one in plans_on(ranks, plan, factorial(64)):
        expected = whole if whole % one.dp == 0 else one.dp * max(1, whole // one.dp)
        assert one.dp * one.microbatches == expected


def test_ranks_of_dp_divide_the_rows_under_cp_too() -> None:
    plans = plans_on(8, Plan(), 6, in_parts=True)
    assert {plan.dp for plan in plans if plan.cp > 1} == {1, 2}
    assert {plan.dp for plan in plans_on(6, Plan(), 6, in_parts=True) if plan.cp > 1} == {1, 2, 3}


def test_a_plan_is_one_of_those_on_its_own_ranks() -> None:
    plan = Plan(pp=2, dp=2, tp=2, microbatches=2, schedule="zb-h1", precision="bf16", overlap=True)
    assert plan in plans_on(8, plan, 8)


def test_replicas_stay_only_where_they_fit() -> None:
    for one in plans_on(8, Plan(dp=4, replicate=2), 8):
        if one.strategy == "none":
            assert one.replicate == (2 if one.dp % 2 == 0 else 1)


def cut_by_sequence(plans: tuple[Plan, ...]) -> list[Plan]:
    return [one for one in plans if one.sequence_parallel != "none" and one.cp == 1]


def with_cp(plans: tuple[Plan, ...]) -> list[Plan]:
    return [one for one in plans if one.cp > 1]


@FEW
@given(RANKS, PLANS)
def test_layouts_with_tp_run_in_parts_both_ways_with_every_mode(ranks: int, plan: Plan) -> None:
    without = plans_on(ranks, plan, factorial(64))
    plans = plans_on(ranks, plan, factorial(64), in_parts=True)
    added = cut_by_sequence(plans)
    assert [one for one in plans if one not in added and one.cp == 1] == list(without)
    for layout in degrees(without):
        ways = [(one.sequence_parallel, one.recompute) for one in added if (one.pp, one.dp, one.tp) == layout]
        assert ways == (list(product(("keep", "regather"), MODES)) if layout[2] > 1 else [])
    assert len(added) < len(without) / 3 or ranks == 1
    assert [one.schedule for one in added] == list(islice(cycle(POLICY_NAMES), len(added)))


def test_parts_of_the_sequence_meet_ways_to_shard() -> None:
    plans = cut_by_sequence(plans_on(4, Plan(microbatches=4), 8, in_parts=True))
    assert {one.strategy for one in plans if one.dp > 1} == {"none", "optimizer", "gradients"}
    assert {one.strategy for one in plans if one.dp == 1} == {"none"}


def test_a_sequence_that_the_plan_cuts_is_cut_as_it_says() -> None:
    plan = Plan(tp=2, sequence_parallel="regather", recompute="full", microbatches=4)
    plans = plans_on(2, plan, 8, in_parts=True)
    assert plans[: -len(with_cp(plans))] == plans_on(2, plan, 8)
    assert {one.sequence_parallel for one in plans} == {"regather"}


@FEW
@given(RANKS, PLANS)
def test_each_layout_with_cp_has_each_attention_and_each_layout_of_positions(ranks: int, plan: Plan) -> None:
    added = with_cp(plans_on(ranks, plan, factorial(64), in_parts=True))
    assert with_cp(plans_on(ranks, plan, factorial(64))) == []
    ways = {(one.pp, one.dp, one.cp, one.tp): [] for one in added}
    for one in added:
        ways[one.pp, one.dp, one.cp, one.tp].append((one.context_parallel, one.context_layout))
    every = product(range(1, ranks + 1), repeat=4)
    assert ways.keys() == {one for one in every if prod(one) == ranks and one[2] > 1}
    six = list(product(("ring", "ulysses"), ("zigzag", "striped", "contiguous")))
    assert all(own == six for own in ways.values())


def test_layouts_of_positions_meet_schedules_ways_to_shard_and_parts() -> None:
    plans = with_cp(plans_on(4, Plan(microbatches=4), 8, in_parts=True))
    assert {one.schedule for one in plans} == set(POLICY_NAMES)
    assert {one.strategy for one in plans} == {"none", "optimizer", "gradients", "full"}
    assert {one.sequence_parallel for one in plans if one.tp > 1} == {"none", "keep", "regather"}
    kinds = {(one.context_layout, one.recompute) for one in plans}
    assert kinds == set(product(("zigzag", "striped", "contiguous"), MODES))


def test_verify_all_keeps_the_plans_attention_method_and_sequence_parallelism() -> None:
    plan = Plan(cp=2, context_parallel="ulysses", sequence_parallel="keep", recompute="full")
    plans = with_cp(plans_on(4, plan, 8, in_parts=True))
    assert {(one.context_parallel, one.sequence_parallel, one.recompute) for one in plans} == {
        ("ulysses", "keep", "full")
    }


TWO_CHUNKS = ("interleaved", "zb-v", "v-half", "v-min")
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2")


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (
            Plan(pp=4, layers_per_stage=(1, 3, 2, 2)),
            [(4, ONE_CHUNK), (2, TWO_CHUNKS), (4, ("auto",)), (2, ("auto",)), (1, ("auto",))],
        ),
        (Plan(pp=2, layers_per_stage=(1, 3, 2)), [(1, ("auto",))]),
        (Plan(pp=2, chunks=2, layers_per_stage=(1, 3, 2, 2)), [(2, POLICY_NAMES)]),
    ],
    ids=["of the policies", "odd", "of the plan"],
)
def test_a_cut_by_hand_stays_where_it_has_a_count_for_each_stage(
    plan: Plan, kept: list[tuple[int, tuple[str, ...]]]
) -> None:
    plans = plans_on(4, plan, 8)
    cut = {(one.pp, one.schedule) for one in plans if one.layers_per_stage is not None}
    assert cut == {(pp, schedule) for pp, schedules in kept for schedule in schedules}
    assert {one.layers_per_stage for one in plans} == {plan.layers_per_stage, None}


def test_each_cut_by_hand_that_stays_can_be_run() -> None:
    case = mlp_case(steps=1)
    plans = [one for one in plans_on(1, Plan(layers_per_stage=(3, 1)), 4) if one.layers_per_stage]
    assert {one.schedule for one in plans} == {*TWO_CHUNKS, "auto"}
    assert all(isinstance(outcome, RankOutcome) for outcome in verify_plans(case, plans[::2]))


@pytest.mark.parametrize(("rows", "expected"), [(6, 3), (5, 1), (8, 2), (1, 1)])
def test_fewer_micro_batches_where_the_rows_do_not_divide(rows: int, expected: int) -> None:
    (plan, *_) = plans_on(1, Plan(microbatches=3), rows)
    assert plan.microbatches == expected


def test_plans_that_cannot_be_are_given_with_the_reason() -> None:
    case = mlp_case(steps=1)
    plans = [Plan(schedule="zb-v", chunks=3), Plan(microbatches=3), Plan(chunks=2), Plan(microbatches=2)]
    one, two, three, four = verify_plans(case, plans)
    assert isinstance(one, RefusedPlan)
    assert "chunks" in one.reason
    assert isinstance(two, RefusedPlan)
    assert "4 rows, which do not divide into 3 micro-batches" in two.reason
    assert isinstance(three, RefusedPlan)
    assert isinstance(four, RankOutcome)
    assert four.findings.differences == []


def test_plans_in_and_without_float8_have_references_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    case = Case(model, cross_entropy, [rows_and_classes()], VerifyOptions(steps=1), device="cpu")
    outcomes = verify_plans(case, [Plan(), Plan(linears="float8"), Plan(linears="float8-rowwise")])
    assert [one.findings.differences for one in outcomes if isinstance(one, RankOutcome)] == [[], [], []]


def test_after_a_plan_that_was_refused_the_next_one_runs(thread_ranks: RankPool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    case = Case(model, cross_entropy, [rows_and_classes()], VerifyOptions(steps=1))
    plans = [Plan(pp=2), Plan(pp=2, layers_per_stage=(2, 1)), Plan(tp=2), Plan(dp=2)]
    results = thread_ranks.run(run_each, case, plans, ranks=2)
    for of_rank in results:
        assert [type(outcome) for outcome in of_rank] == [RankOutcome, RefusedPlan, RefusedPlan, RankOutcome]
    told = [{of_rank[number].reason for of_rank in results} for number in (1, 2)]
    assert [len(reasons) for reasons in told] == [1, 1]


@FEW
@given(st.integers(1, 8), PLANS)
def test_experts_are_divided_in_every_way_over_each_layout(ranks: int, plan: Plan) -> None:
    """Also those of a plan that divides them itself, which other layouts may not allow."""
    given = replace(plan, dp=2, ep=2)
    plans = plans_on(ranks, given, factorial(64), in_parts=True, with_experts=True)
    without = plans_on(ranks, given, factorial(64), in_parts=True)
    assert not any(one.divides_experts for one in without)
    divided = plans[len(without) :]
    assert plans[: len(without)] == without
    found = {(one.pp, one.dp, one.cp, one.tp, one.ep, one.etp) for one in divided}
    layouts = {(one.pp, one.dp, one.cp, one.tp) for one in without}
    assert len(found) == len(divided)
    assert found == {
        (*layout, ep, etp)
        for layout in layouts
        for ep, etp in product(range(1, ranks + 1), repeat=2)
        if ep * etp > 1 and prod(layout[1:]) % (ep * etp) == 0
    }
