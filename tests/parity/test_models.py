"""Users' models: whatever is awkward about them, the woven run equals the single device."""

import pytest

from parity.cases import ONE_STAGE, USER_CASES, gpt2, single_module
from parity.pairs import covering_rows, in_turns
from parity.parity import THREE_STEPS, check_parity
from parity.woven import layer_count
from plait.plan.plan import Plan
from plait.ranks.collectives import SMALLEST_SHARED

CUTS = [
    pytest.param(case, (first, layer_count(case) - first), id=f"{case.name}-{first}")
    for case in USER_CASES
    for first in range(1, layer_count(case))
]
LAYOUTS = covering_rows(
    {
        "name": tuple(case.name for case in USER_CASES),
        "degrees": ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)),
        "schedule": ONE_STAGE,
        "microbatches": (1, 5),
    }
)
BY_NAME = {case.name: case for case in USER_CASES}
PLANS = {
    "two stages": Plan(pp=2, dp=2, schedule="1f1b", microbatches=3, precision="fp64"),
    "four stages": Plan(pp=4, schedule="gpipe", microbatches=2, precision="fp64"),
}


@pytest.mark.parametrize(("case", "plan"), in_turns(BY_NAME, PLANS))
def test_users_models_train_as_one_rank(thread_ranks, case, plan):
    check_parity(thread_ranks, case, plan)


def identify(row):
    (pp, dp), name = row["degrees"], row["name"]
    return f"{name}-pp{pp}-dp{dp}-{row['schedule']}-m{row['microbatches']}"


@pytest.mark.full
@pytest.mark.parametrize("row", LAYOUTS, ids=identify)
def test_users_models_train_as_one_rank_on_all_degrees_of_pp_and_dp(thread_ranks, row):
    pp, dp = row["degrees"]
    plan = Plan(pp=pp, dp=dp, schedule=row["schedule"], microbatches=row["microbatches"], precision="fp64")
    check_parity(thread_ranks, BY_NAME[row["name"]], plan, THREE_STEPS)


@pytest.mark.full
@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_users_models_train_as_one_rank_at_every_cut_into_two_stages(thread_ranks, case, cut):
    plan = Plan(pp=2, layers_per_stage=cut, microbatches=3, precision="fp64")
    check_parity(thread_ranks, case, plan, THREE_STEPS)


def test_a_module_that_is_no_sequential_trains_as_one_layer(thread_ranks):
    check_parity(thread_ranks, single_module(), Plan(dp=2, microbatches=2, precision="fp64"))


@pytest.mark.parametrize("cut", [(1, 5), (5, 1), (1, 1, 3, 1)], ids=str)
def test_gpt2_cut_by_layers_per_stage_trains_as_one_rank(thread_ranks, cut):
    plan = Plan(pp=len(cut), layers_per_stage=cut, microbatches=3, precision="fp64")
    check_parity(thread_ranks, gpt2(layers=2, tied=True), plan)


@pytest.mark.parametrize(("pp", "dp", "schedule"), [(2, 2, "1f1b"), (4, 1, "gpipe")], ids=str)
def test_gpt2_in_fp32_trains_as_one_rank(thread_ranks, pp, dp, schedule):
    plan = Plan(pp=pp, dp=dp, schedule=schedule, microbatches=3, precision="fp32")
    check_parity(thread_ranks, gpt2(layers=2, tied=True), plan)


@pytest.mark.parametrize(("pp", "dp"), [(1, 3), (2, 2)])
def test_gradients_in_shared_memory_equal_those_of_one_rank(thread_ranks, pp, dp):
    """Wide enough for units, and for the tied one, to lie where all ranks reach them."""
    wide = gpt2(layers=1, hidden=128, vocab=300)
    assert SMALLEST_SHARED < 300 * 128 * 8
    check_parity(thread_ranks, wide, Plan(pp=pp, dp=dp, microbatches=2, precision="fp64"))
