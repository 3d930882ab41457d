"""The same sums in the same order: schedules of one layout give the same bits."""

import pytest
import torch

from parity import woven
from parity.case import Recipe
from parity.cases import ONE_STAGE, USER_CASES, gpt2
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan
from plait.schedules.search.stage_cuts import balance

BY_NAME = {case.name: case for case in USER_CASES}
LAYOUTS = [(2, 1, 3), (4, 1, 5), (4, 1, 2), (2, 2, 4)]


IN_A_V = ("zb-v", "v-half", "v-min")


def bits(thread_ranks, case, pp, dp, microbatches, schedule):
    layers = len(sequence_of(case.build()).layers)
    stages = 2 * pp if schedule in IN_A_V else pp
    plan = Plan(
        pp=pp,
        dp=dp,
        schedule=schedule,
        microbatches=microbatches,
        precision="fp64",
        layers_per_stage=balance([1.0] * layers, stages),  # by itself each schedule would choose its own
    )
    return thread_ranks.run(woven.train, case, plan, Recipe(steps=1), ranks=plan.world)


def check(thread_ranks, case, layout, schedules=ONE_STAGE):
    runs = (bits(thread_ranks, case, *layout, schedule) for schedule in schedules)
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert first.losses == other.losses
            assert first.norms == other.norms
            for what in ("gradients", "parameters"):
                ours, theirs = getattr(first, what), getattr(other, what)
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_schedules_give_gpt2_the_same_bits(thread_ranks, layout):
    check(thread_ranks, gpt2(layers=2, tied=layout[1] == 1), layout)


@pytest.mark.parametrize("name", ["crossing_ties", "convolution"])
def test_all_schedules_give_users_models_the_same_bits(thread_ranks, name):
    check(thread_ranks, BY_NAME[name], (4, 1, 4))


@pytest.mark.parametrize("layout", [(2, 1, 5), (4, 1, 4), (2, 2, 3)], ids=str)
def test_all_schedules_in_a_v_give_gpt2_the_same_bits(thread_ranks, layout):
    check(thread_ranks, gpt2(layers=3, tied=True), layout, IN_A_V)
