"""Costs of layers, and the even cut of layers into stages."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.schedules.costs import Costs
from plait.schedules.search.layer_costs import LayerCosts, balance


def test_unmeasured_layer_costs_are_split_evenly_over_f_i_and_w() -> None:
    costs = LayerCosts.evenly([3, 6, 9])
    assert costs.F == costs.I == costs.W == (1, 2, 3)
    assert costs.total == (3, 6, 9)
    assert costs.of_stages((1, 2)) == Costs(F=(1, 5), I=(1, 5), W=(1, 5))


def test_costs_of_a_stage_are_the_sums_of_its_layers_by_kind() -> None:
    costs = LayerCosts(F=(1, 2, 3), I=(4, 5, 6), W=(0, 1, 0))
    assert costs.total == (5, 8, 9)
    assert costs.of_stages((2, 1)) == Costs(F=(3, 3), I=(9, 6), W=(1, 0))


def test_messages_cost_the_ranks_that_send_and_receive_them() -> None:
    costs = LayerCosts(F=(1, 2, 3), I=(4, 5, 6), W=(0, 1, 0), comm=9, message=0.5)
    assert costs.of_stages((2, 1)) == Costs(F=(3.5, 3.5), I=(9.5, 6.5), W=(1, 0), comm=9)
    assert costs.with_messages(2).comm == 0.01 * 22 / 2
    assert costs.with_messages(2).message == 0.0025 * 22 / 2


def test_cost_of_the_loss_moves_from_forward_and_weight_to_input_gradient() -> None:
    costs = LayerCosts.evenly([3, 6, 9]).in_input_gradient(-1, 6)
    assert costs == LayerCosts(F=(1, 2, 1), I=(1, 2, 7), W=(1, 2, 1))
    assert costs.in_input_gradient(0, 30) == LayerCosts(F=(0, 2, 1), I=(3, 2, 7), W=(0, 2, 1))


COSTS = st.one_of(st.integers(0, 6).map(float), st.sampled_from((0.1, 0.2, 0.3)), st.floats(0, 1e6))


def by_brute_force(costs: list[float], parts: int) -> tuple[int, ...]:
    """The best of all cuts: least peak, then least sum of squares, then most layers in front."""

    def rank(counts: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        rest = [Fraction(cost) for cost in costs]
        stages = []
        for count in counts:
            stages.append(sum(rest[:count], Fraction()))
            rest = rest[count:]
        return max(stages), sum((s * s for s in stages), Fraction()), tuple(-count for count in counts)

    cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), parts - 1))
    return min((tuple(b - a for a, b in pairwise(cut)) for cut in cuts), key=rank)


@given(st.lists(COSTS, min_size=1, max_size=8), st.data())
def test_balance_finds_the_cut_of_brute_force(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    assert balance(costs, parts) == by_brute_force(costs, parts)


@pytest.mark.parametrize(
    ("costs", "parts", "counts"),
    [
        ([1, 1, 1, 1, 1], 2, (3, 2)),  # as divide(5, 2) cuts
        ([1] * 10, 4, (3, 3, 2, 2)),
        ([1, 2, 3], 1, (3,)),
        ([1, 2, 3], 3, (1, 1, 1)),
        ([0, 0, 0], 2, (2, 1)),
        ([3, 1, 1, 1, 1, 1, 4], 3, (2, 4, 1)),  # a dear embedding and a dearer head
        ([9, 1, 1, 1, 1], 3, (1, 2, 2)),  # the peak is fixed: the rest is evened out
        ([1, 1, 3, 5, 1], 3, (3, 1, 1)),  # stages of 5, 5, 1: 2, 3, 6 has fewer squares but a higher peak
        ([0.1, 0.2, 0.3], 2, (2, 1)),  # 0.1 + 0.2 is above 0.3, yet it is the best peak
    ],
)
def test_balance_finds_the_listed_cuts(costs: list[float], parts: int, counts: tuple[int, ...]) -> None:
    assert balance(costs, parts) == counts


@pytest.mark.parametrize("parts", [0, -1])
def test_balance_refuses_fewer_than_one_stage(parts: int) -> None:
    with pytest.raises(PlanError, match=f"2 layers cannot be cut into {parts} stages"):
        balance([1, 1], parts)


def test_balance_refuses_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match=r"4 stages need at least 4 layers, but the model has 3: lower pp"):
        balance([1, 1, 1], 4)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_balance_refuses_negative_infinite_or_nan_costs(cost: float) -> None:
    with pytest.raises(PlanError, match="the cost of layer 1 is"):
        balance([1.0, cost], 1)
