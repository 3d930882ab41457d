"""Several backwards before one step of the optimizer, and both ways of setting gradients to zero."""

import pytest

from parity.case import Recipe
from parity.cases import USER_CASES, gpt2
from parity.parity import check_parity
from plait.plan.plan import Plan

CASES = {"gpt2": gpt2(), **{case.name: case for case in USER_CASES}}


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize(
    ("name", "calls", "optimizer", "pp", "dp"),
    [
        ("gpt2", 2, "adamw", 2, 2),
        ("ignored_targets", 3, "sgd", 2, 1),
        ("frozen_first", 2, "sgd", 1, 2),
        ("gpt2", 1, "sgd", 1, 1),
    ],
)
def test_gradients_of_several_calls_add_up_as_on_one_rank(
    thread_ranks, name, calls, optimizer, pp, dp, set_to_none
):
    recipe = Recipe(calls=calls, optimizer=optimizer, set_to_none=set_to_none)
    check_parity(thread_ranks, CASES[name], Plan(pp=pp, dp=dp, microbatches=3, precision="fp64"), recipe)
