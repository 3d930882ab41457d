"""Right layouts are equal to one rank: the verifier cries wolf over none of them."""

from dataclasses import replace

import pytest

from parity.cases import gpt2, llama, sparse_llama
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import POLICY_NAMES
from plait.verification.rank_verification import verify_rank
from plait.verification.step_location import StepPhase
from plait.verification.sweep import RefusedPlan, plans_on, verify_plans
from plait.verification.verify import build_report
from zoo.context import PACKED
from zoo.fine_tuning import ADAPTED_AND_DROPPING, NORMS
from zoo.float8_linears import MODEL as IN_FLOAT8
from zoo.row import case_of, report_of
from zoo.sparse import EP, TIED
from zoo.unusual import MIXTURES, OTHERS, TRANSFORMERS
from zoo.unusual_mixtures import (
    DIVIDED_MIXTURES,
    scores_rounded_otherwise_and_not_replayed,
    scores_rounded_otherwise_on_one_rank,
)

BLOCKS = {1: 1, 2: 1, 4: 3}
"""By ranks: enough for two stages on each."""


def model_of(name, ranks):
    layers = BLOCKS[ranks]
    return gpt2(layers=layers, heads=4) if name == "gpt2" else llama(layers=layers, heads=4, kv_heads=2)


MODELS = ("gpt2", "llama")
PLAN = Plan(microbatches=4)
ROWS = 8
IN_TURNS = {"gpt2": slice(0, None, 3), "llama": slice(1, None, 3)}
"""Of the plans on one rank and on two: every third one."""
EACH = {"gpt2": (4, 29, 62, 165), "llama": (15, 71, 111, 67, 159)}
"""Of 168 plans on four ranks: each layout at least once, each schedule once, in turns; dp is sharded."""


def layout_of(plan):
    return plan.pp, plan.dp, plan.tp


def plans_of(ranks):
    """The plans on which every rank has whole sequences."""
    return [plan for plan in plans_on(ranks, PLAN, ROWS, in_parts=True) if plan.cp == 1]


def in_shards_of(ranks):
    """The plans that cut sequences between layers."""
    return [plan for plan in plans_of(ranks) if plan.cuts_sequence]


def with_cp(ranks):
    """The plans on which ranks of cp have parts of sequences."""
    return [plan for plan in plans_on(ranks, PLAN, ROWS, in_parts=True) if plan.cp > 1]


def verified(thread_ranks, model, plans, ranks):
    case = case_of(model, PLAN)
    outcomes = thread_ranks.run(verify_plans, case, plans, ranks=ranks)
    for plan, own in zip(plans, zip(*outcomes, strict=True), strict=True):
        assert not any(isinstance(outcome, RefusedPlan) for outcome in own), (plan, own[0])
        yield build_report(own, plan, case.options)


@pytest.mark.parametrize(
    ("name", "ranks", "number"),
    [
        ("gpt2", 1, 18),
        ("llama", 1, 18),
        pytest.param("gpt2", 2, 75, marks=pytest.mark.full),
        pytest.param("llama", 2, 75, marks=pytest.mark.full),
    ],
)
def test_correct_runs_of_selected_plans_are_equal(thread_ranks, name, ranks, number):
    plans = plans_of(ranks)
    assert len(plans) == number
    for report in verified(thread_ranks, model_of(name, ranks), plans[IN_TURNS[name]], ranks):
        assert report, report


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_selected_plans_cover_each_layout_with_each_schedule(ranks):
    plans = plans_of(ranks)
    chosen = [plan for turns in IN_TURNS.values() for plan in plans[turns]]
    assert len(set(chosen)) == len(chosen)
    both = {(layout_of(plan), plan.schedule) for plan in plans}
    assert {(layout_of(plan), plan.schedule) for plan in chosen} == both
    assert {plan.recompute for plan in chosen} == {plan.recompute for plan in plans}
    assert {plan.sequence_parallel for plan in chosen} == {plan.sequence_parallel for plan in plans}


@pytest.mark.parametrize(
    ("name", "ranks", "turns"),
    [
        pytest.param("gpt2", 2, slice(0, None, 2), marks=pytest.mark.full),
        pytest.param("llama", 2, slice(1, None, 2), marks=pytest.mark.full),
        pytest.param("gpt2", 3, slice(None), marks=pytest.mark.full),
        pytest.param("llama", 4, slice(0, None, 2), marks=pytest.mark.full),
        pytest.param("gpt2", 4, slice(1, None, 2), marks=pytest.mark.full),
    ],
)
def test_plans_with_cp_are_equal(thread_ranks, name, ranks, turns):
    """In the quick run `unit/verification/test_verify_context.py` has some, in all modes."""
    model = gpt2(layers=3, hidden=24, heads=6) if ranks == 3 else model_of(name, ranks)
    for report in verified(thread_ranks, model, with_cp(ranks)[turns], ranks):
        assert report, report


@pytest.mark.parametrize(
    ("name", "ranks", "turns"),
    [
        ("gpt2", 2, slice(4, None, 29)),
        pytest.param("gpt2", 1, slice(5, None, 9), marks=pytest.mark.full),
        pytest.param("gpt2", 2, slice(1, None, 3), marks=pytest.mark.full),
        pytest.param("llama", 2, slice(2, None, 3), marks=pytest.mark.full),
        pytest.param("llama", 4, slice(3, None, 9), marks=pytest.mark.full),
    ],
)
def test_plans_with_the_loss_in_chunks_are_equal(thread_ranks, name, ranks, turns):
    plans = plans_on(ranks, replace(PLAN, loss_rows=5), ROWS, in_parts=True)[turns]
    assert all(plan.loss_rows == 5 for plan in plans)
    for report in verified(thread_ranks, model_of(name, ranks), plans, ranks):
        assert report, report


@pytest.mark.parametrize(
    ("ranks", "turns"),
    [(2, slice(2, None, 6)), *(pytest.param(ranks, slice(None), marks=pytest.mark.full) for ranks in (2, 4))],
)
def test_plans_that_divide_experts_are_equal(thread_ranks, ranks, turns):
    model = sparse_llama(layers=BLOCKS[ranks])
    plans = plans_on(ranks, PLAN, ROWS, in_parts=True, with_experts=True)
    divided = [plan for plan in plans if plan.divides_experts]
    assert len(plans) == len(divided) + len(plans_on(ranks, PLAN, ROWS, in_parts=True))
    assert {(plan.ep, plan.etp) for plan in divided} == {
        (ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if 1 < ep * etp <= ranks
    }
    for report in verified(thread_ranks, model, divided[turns], ranks):
        assert report, report


@pytest.mark.parametrize(
    ("linears", "turns"),
    [
        ("float8", slice(7, None, 40)),
        pytest.param("float8", slice(0, None, 3), marks=pytest.mark.full),
        pytest.param("float8-rowwise", slice(1, None, 3), marks=pytest.mark.full),
        pytest.param("float8-rowwise-gw", slice(2, None, 3), marks=pytest.mark.full),
    ],
)
def test_plans_in_float8_are_equal(thread_ranks, linears, turns):
    plans = plans_on(2, replace(PLAN, linears=linears), ROWS, in_parts=True)
    assert {plan.linears for plan in plans} == {linears}
    for report in verified(thread_ranks, IN_FLOAT8, plans[turns], 2):
        assert report, report


@pytest.mark.parametrize(
    "turns",
    [
        slice(11, None, 40),
        pytest.param(slice(0, None, 4), marks=pytest.mark.full),
    ],
)
def test_plans_of_experts_in_float8_are_equal(thread_ranks, turns):
    model = sparse_llama(layers=BLOCKS[2], experts=4, shared=0, wide=True)
    plan = replace(PLAN, linears="float8-rowwise-gw")
    plans = [one for one in plans_on(2, plan, ROWS, in_parts=True, with_experts=True) if one.divides_experts]
    assert {(plan.ep, plan.etp) for plan in plans} == {(2, 1), (1, 2)}
    for report in verified(thread_ranks, model, plans[turns], 2):
        assert report, report


FINE_TUNED = {"adapters": ADAPTED_AND_DROPPING, "documents": PACKED, "norms": NORMS}
"""`norms` has three layers: on one rank of pp, since not every schedule has a stage for each."""


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        pytest.param("adapters", slice(25, None, 40), marks=pytest.mark.full),
        ("norms", slice(3, None, 40)),
        pytest.param("adapters", slice(0, None, 3), marks=pytest.mark.full),
        pytest.param("documents", slice(1, None, 3), marks=pytest.mark.full),
        pytest.param("norms", slice(2, None, 3), marks=pytest.mark.full),
    ],
)
def test_plans_of_fine_tuning_are_equal(thread_ranks, name, turns):
    plans = [one for one in plans_on(2, PLAN, ROWS, in_parts=True) if one.pp == 1 or name != "norms"]
    for report in verified(thread_ranks, FINE_TUNED[name], plans[turns], 2):
        assert report, report


QUICK = (
    "float8 exact",
    "experts in float8 exact",
    "float32 inside",
    "tuples recomputed by layer",
    "frozen and tied",
    "losses of documents cp",
)


@pytest.mark.parametrize(
    "right",
    [
        pytest.param(one, id=one.name, marks=[] if one.name in QUICK else [pytest.mark.full])
        for one in (*OTHERS, *MIXTURES, *DIVIDED_MIXTURES, *TRANSFORMERS)
    ],
)
def test_unusual_models_and_plans_are_equal(thread_ranks, right):
    case = case_of(right.model, right.plan, right.options)
    outcomes = thread_ranks.run(verify_rank, case, right.plan, ranks=right.plan.world)
    report = build_report(outcomes, right.plan, case.options)
    assert report, report
    assert not report.left_out, report


def test_tokens_whose_scores_are_as_near_as_rounding_take_the_experts_of_the_reference(rank_pool):
    """Zero tokens have equal scores: on rank 1 a rounding error makes the last experts theirs."""
    report = report_of(rank_pool, TIED, EP, scores_rounded_otherwise_on_one_rank)
    assert report, report
    unaided = report_of(rank_pool, TIED, EP, scores_rounded_otherwise_and_not_replayed)
    assert (unaided.first.difference.location.phase, unaided.first.layer) == (StepPhase.ROUTING, "0")
    assert "differ by 0.0e+00, within" in unaided.first.cause


def test_the_chosen_plans_are_each_layout_and_schedule():
    plans = plans_on(4, PLAN, ROWS)
    chosen = [plans[number] for numbers in EACH.values() for number in numbers]
    assert len(plans) == 168
    assert len({layout_of(plan) for plan in chosen}) == 6
    assert sorted(plan.schedule for plan in chosen) == sorted(POLICY_NAMES)
    assert all(plan.shards == (plan.dp > 1) for plan in chosen)
    assert {plan.replicate for plan in chosen} == {1, 2}
    assert {plan.recompute for plan in chosen} == {"none", "selective", "full"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_layout_of_four_ranks_is_equal(thread_ranks, name):
    plans = plans_on(4, PLAN, ROWS)
    chosen = [plans[number] for number in EACH[name]] + in_shards_of(4)[MODELS.index(name) :: 6]
    for report in verified(thread_ranks, model_of(name, 4), chosen, 4):
        assert report, report


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_is_equal(thread_ranks, name, ranks):
    plans = plans_on(ranks, PLAN, ROWS, in_parts=True)
    for report in verified(thread_ranks, model_of(name, ranks), plans, ranks):
        assert report, report
