"""Costs of layers; cuts of a model into stages: even, simulated, the fastest, and with a schedule."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.cases import ONE_STAGE
from plait.errors import PlanError, ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.action import Action, Kind
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.schedule import Schedule
from plait.schedules.search import stage_cuts as module
from plait.schedules.search.schedule_by_policy import schedule
from plait.schedules.search.stage_cuts import (
    CutSimulation,
    LayerCosts,
    StageCut,
    balance,
    fastest_cut,
    fastest_cut_of_unlike_ranks,
    schedule_and_cut,
)


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


COST_OF_A_LAYER = st.one_of(st.integers(0, 6).map(float), st.sampled_from((0.1, 0.2, 0.3)), st.floats(0, 1e6))


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


@given(st.lists(COST_OF_A_LAYER, min_size=1, max_size=8), st.data())
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


POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half")


@given(
    policy=st.sampled_from(POLICIES),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    costs=st.lists(st.floats(0.01, 10), min_size=8, max_size=12),
    split=st.booleans(),
    message=st.sampled_from((0.0, 0.1, 1.7)),
)
def test_the_makespan_is_that_of_the_timeline(policy, ranks, microbatches, costs, split, message) -> None:
    made = schedule(policy, ranks=ranks, microbatches=microbatches)
    made = made.split_backward if split else made
    layers = LayerCosts.evenly(costs)
    layers = LayerCosts(layers.F, layers.I, layers.W, comm=message, message=message / 7)
    cut = balance(costs, made.stages)
    simulation = CutSimulation(layers, made)
    expected = simulate(made, layers.of_stages(cut)).makespan
    assert simulation.makespan(cut) / 2**simulation._exponent == pytest.approx(expected, rel=1e-9)


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 4), split=st.booleans(), data=st.data())
def test_no_cut_takes_less_than_the_lower_bound(policy, ranks, split, data) -> None:
    made = schedule(policy, ranks=ranks, microbatches=data.draw(st.integers(1, 6)))
    made = made.split_backward if split else made
    cut = data.draw(st.lists(st.integers(1, 3), min_size=made.stages, max_size=made.stages))
    each = st.lists(st.floats(0.01, 10), min_size=sum(cut), max_size=sum(cut))
    layers = LayerCosts(
        data.draw(each), data.draw(each), data.draw(each), comm=data.draw(st.sampled_from((0.0, 0.4)))
    )
    simulation = CutSimulation(layers, made)
    assert simulation.least(cut) <= simulation.makespan(cut)


def test_the_lower_bound_is_reached_where_nothing_waits() -> None:
    layers = LayerCosts.evenly([1.0] * 8)
    for policy in ("zb-h1", "zb-v"):
        made = schedule(policy, ranks=4, microbatches=6).split_backward
        simulation, cut = CutSimulation(layers, made), balance(layers.total, made.stages)
        assert simulation.least(cut) == simulation.makespan(cut), policy


def test_a_deadlocked_order_is_refused_by_the_cut_simulation() -> None:
    rows = ((Action(0, Kind.I, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0), Action(1, Kind.I, 0)))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0I0"):
        CutSimulation(COSTS, Schedule("deadlocked", 1, (0, 1), rows)).makespan((4, 4))


COSTS = LayerCosts.evenly([1.0] * 8)


def makespan_of(cut: StageCut, made: Schedule) -> float:
    return simulate(made, COSTS.of_stages(cut)).makespan


def refuse_chunks(refused: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit is kept with some numbers of chunks only."""

    def within_limit(*arguments: Any, chunks: int, **options: Any) -> Schedule:
        if chunks in refused:
            raise ScheduleError(f"{chunks} chunks do not keep the limit.")
        return schedule(*arguments, chunks=chunks, **options)

    module._automatic.cache_clear()  # what was found before nobody asks for again
    monkeypatch.setattr(module, "schedule", within_limit)


def test_the_shortest_number_of_chunks_wins() -> None:
    """`schedule_and_cut` takes the number of stages per rank with the shortest makespan."""
    made, cut = schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)
    alone = [
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2, chunks=chunks) for chunks in range(1, 5)
    ]
    assert makespan_of(cut, made) == min(makespan_of(own, one) for one, own in alone)
    assert made.stages > 2


@pytest.mark.parametrize("refused", [{1}, {4}, {1, 3, 4}], ids=str)
def test_a_number_of_chunks_that_does_not_keep_the_limit_is_passed_over(
    refused: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_chunks(refused, monkeypatch)
    made, cut = schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)
    assert made.stages // 2 not in refused
    assert (len(cut), sum(cut)) == (made.stages, 8)


def test_auto_is_refused_where_no_number_of_chunks_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScheduleError, match=r"^limit is 0\.5, less than .* give at least 1\.$"):
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2, limit=0.5)
    refuse_chunks({1, 2, 3, 4}, monkeypatch)
    with pytest.raises(ScheduleError, match=r"^4 chunks do not keep the limit"):
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)


@pytest.mark.parametrize(("policy", "stages"), [("auto", 4), ("zb-v", 4), ("1f1b", 2)])
def test_a_cut_by_hand_is_taken_as_it_is(policy: str, stages: int) -> None:
    by_hand = {4: (1, 3, 2, 2), 2: (3, 5)}[stages]
    made, cut = schedule_and_cut(policy, COSTS, ranks=2, microbatches=2, cut=by_hand)
    assert (made.stages, cut) == (stages, by_hand)


@pytest.mark.parametrize("policy", ["auto", "1f1b"])
def test_a_cut_by_hand_of_another_number_of_stages_is_refused(policy: str) -> None:
    with pytest.raises(PlanError, match=r"\[2, 3, 3\] does not cut 8 layers into 2 stages"):
        schedule_and_cut(policy, COSTS, ranks=2, microbatches=2, cut=(2, 3, 3))


def cuts_of(layers: int, stages: int) -> list[StageCut]:
    bounds = combinations(range(1, layers), stages - 1)
    return [tuple(stop - start for start, stop in pairwise((0, *inner, layers))) for inner in bounds]


@given(
    costs=st.lists(st.integers(1, 9), min_size=4, max_size=8),
    factors=st.lists(st.sampled_from((1.0, 1.5, 2.0, 4.0)), min_size=3, max_size=3),
)
def test_the_cut_for_unlike_stages_has_the_least_largest_stage(
    costs: list[int], factors: list[float]
) -> None:
    def largest(cut: StageCut) -> float:
        stops = list(itertools.accumulate(cut, initial=0))
        pairs = zip(factors, pairwise(stops), strict=True)
        return max(factor * sum(costs[start:stop]) for factor, (start, stop) in pairs)

    found = module._even_cut_of_unlike_stages(costs, factors)
    assert len(found) == 3
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert largest(found) == pytest.approx(min(map(largest, cuts_of(len(costs), 3))))


@pytest.mark.parametrize("slow", range(3))
def test_layers_move_away_from_a_slow_rank_as_the_simulation_says(slow: int) -> None:
    costs = LayerCosts.evenly([2.0] * 9)
    made = schedule("1f1b", ranks=3, microbatches=6)
    factors = [2.0 if rank == slow else 1.0 for rank in range(3)]
    cut = fastest_cut_of_unlike_ranks(costs, made, factors, (3, 3, 3))

    def makespan(cut: StageCut) -> float:
        stages = [count * 2.0 * factors[stage] / 3 for stage, count in enumerate(cut)]
        return simulate(made.split_backward, Costs(F=stages, I=stages, W=stages)).makespan

    assert makespan(cut) == pytest.approx(min(map(makespan, cuts_of(9, 3))))
    assert cut[slow] < 3
