from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.schedules.search.layer_costs import balance

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
