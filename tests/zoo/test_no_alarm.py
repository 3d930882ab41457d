"""Right layouts are equal to one rank: the verifier cries wolf over none of them."""

import pytest

from parity.cases import gpt2, llama
from plait.blueprint import SCHEDULES
from plait.plan import Plan
from plait.verification.layouts import Refused, plans_on, run_all
from plait.verification.verify import report_on
from zoo.row import case_of

MODELS = {"gpt2": gpt2(layers=1, heads=4), "llama": llama(layers=1, heads=4, kv_heads=2)}
PLAN = Plan(microbatches=4)
ROWS = 8
EACH = {"gpt2": (0, 10, 17), "llama": (7, 13, 22)}
"""Of 24 plans on four ranks: each layout once, each schedule at least once, in turns."""


def verified(pool, model, plans, ranks):
    case = case_of(model, PLAN)
    outcomes = pool.run(run_all, case, plans, ranks=ranks)
    for number, plan in enumerate(plans):
        own = [every[number] for every in outcomes]
        assert not any(isinstance(outcome, Refused) for outcome in own), (plan, own[0])
        yield report_on(case, plan, own)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_is_equal(rank_pool, name, ranks):
    reports = list(verified(rank_pool, MODELS[name], plans_on(ranks, PLAN, ROWS), ranks))
    assert len(reports) == {1: 4, 2: 12}[ranks]
    for report in reports:
        assert report, report


def test_the_chosen_plans_are_each_layout_and_schedule():
    chosen = [plans_on(4, PLAN, ROWS)[number] for numbers in EACH.values() for number in numbers]
    assert len({(plan.pp, plan.dp, plan.tp) for plan in chosen}) == len(chosen) == 6
    assert {plan.schedule for plan in chosen} == set(SCHEDULES)


@pytest.mark.parametrize("name", MODELS)
def test_each_layout_of_four_ranks_is_equal(rank_pool, name):
    plans = plans_on(4, PLAN, ROWS)
    chosen = [plans[number] for number in EACH[name]]
    for report in verified(rank_pool, MODELS[name], chosen, 4):
        assert report, report


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_four_ranks_is_equal(rank_pool, name):
    for report in verified(rank_pool, MODELS[name], plans_on(4, PLAN, ROWS), 4):
        assert report, report
