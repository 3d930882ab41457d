"""The cut is the one whose simulated step is shortest, as far as single moves reach."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.cases import ONE_STAGE
from plait.errors import PlanError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.check import check
from plait.schedules.search.api import schedule
from plait.schedules.search.layer_costs import LayerCosts, balance
from plait.schedules.search.stage_cuts import fastest_cut


def makespan(costs, cut, order):
    return simulate(order.split_backward, LayerCosts.evenly(costs).of_stages(cut)).makespan


def every_cut(layers, stages):
    for bounds in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *bounds), (*bounds, layers), strict=True))


# Embedding, eight blocks of attention and MLP, head.
GPT = [0.0, *(1.3, 2.1) * 8, 4.2]


@pytest.mark.parametrize(
    ("policy", "microbatches", "cut"),
    [("1f1b", 8, (11, 7)), ("1f1b", 32, (10, 8)), ("gpipe", 8, (10, 8))],
)
def test_a_step_of_few_micro_batches_is_cut_unevenly(policy, microbatches, cut):
    order = schedule(policy, ranks=2, microbatches=microbatches)
    assert balance(GPT, 2) == (10, 8)
    assert fastest_cut(LayerCosts.evenly(GPT), order) == cut


def test_with_many_micro_batches_the_fastest_cut_is_even():
    order = schedule("1f1b", ranks=2, microbatches=64)
    assert fastest_cut(LayerCosts.evenly([1.0] * 8), order) == (4, 4)


@given(
    # Thirds of them are whole, so that no rounding decides.
    costs=st.lists(st.sampled_from(range(0, 30, 3)).map(float), min_size=2, max_size=8),
    policy=st.sampled_from(ONE_STAGE),
    microbatches=st.integers(1, 6),
)
def test_two_stages_are_never_worse_than_even(costs, policy, microbatches):
    order = schedule(policy, ranks=2, microbatches=microbatches)
    found = fastest_cut(LayerCosts.evenly(costs), order)
    assert makespan(costs, found, order) <= makespan(costs, balance(costs, 2), order)


@given(
    # Thirds of them are whole, so that no rounding decides.
    costs=st.lists(st.sampled_from(range(3, 30, 3)).map(float), min_size=4, max_size=7),
    microbatches=st.integers(1, 6),
)
def test_moving_a_single_layer_never_shortens_the_fastest_cut(costs, microbatches):
    order = schedule("1f1b", ranks=3, microbatches=microbatches)
    found = fastest_cut(LayerCosts.evenly(costs), order)
    for cut in every_cut(len(costs), 3):
        if sum(abs(a - b) for a, b in zip(cut, found, strict=True)) == 2 and cut[1] != found[1]:
            assert makespan(costs, cut, order) >= makespan(costs, found, order)


def test_a_split_schedule_is_legal_and_ends_no_later():
    order = schedule("1f1b", ranks=4, microbatches=6)
    split = order.split_backward
    check(split)
    assert simulate(split).makespan <= simulate(order).makespan


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanError, match="3 stages need at least 3 layers"):
        fastest_cut(LayerCosts.evenly([1.0, 1.0]), schedule("1f1b", ranks=3, microbatches=2))
