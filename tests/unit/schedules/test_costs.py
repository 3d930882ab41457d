"""Costs of actions, and the memory that a schedule holds by them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import product
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, held_by_intervals, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import (
    LARGEST,
    SMALLEST,
    UNLIMITED,
    Costs,
    MemoryCosts,
    Ticks,
    limit_in_units,
    memory_use,
    peak_memory,
)
from plait.schedules.event_simulation import Timing
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

FOUR = policy_schedule("1f1b", 4, 1)
LOOP = Schedule("loop", 1, (0, 1, 0, 1, 0, 1), ((), ()))

PER_STAGE = ("F", "I", "W", "until_I", "until_W")


@pytest.mark.parametrize("name", [*PER_STAGE, "comm"])
@pytest.mark.parametrize("wrong", [-1, -0.001, nan, inf, -inf, True, False, None, 1j, Decimal(1)])
def test_negative_infinite_or_non_numeric_costs_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Costs(**{name: wrong})
    assert str(caught.value) == f"costs.{name} is {wrong!r}: give a finite number of at least 0."


@pytest.mark.parametrize("name", PER_STAGE)
@pytest.mark.parametrize("wrong", [-2, nan, inf, True, None, "1", (1,)])
def test_invalid_costs_within_a_sequence_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ScheduleError) as caught:
        Costs(**{name: (1, wrong)})
    assert str(caught.value) == f"costs.{name}[1] is {wrong!r}: give a finite number of at least 0."


def test_text_is_no_sequence_of_costs() -> None:
    with pytest.raises(ScheduleError, match=r"costs.I is '1': give a finite number of at least 0\."):
        Costs(I="1")  # type: ignore[arg-type]


def test_a_cost_is_none_or_within_the_range_of_exact_times() -> None:
    for name, wrong in product((*PER_STAGE, "comm"), (SMALLEST / 2, LARGEST * 2)):
        with pytest.raises(ScheduleError) as caught:
            Costs(**{name: wrong})  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"costs.{name} is {wrong!r}: choose a unit in which it is from {SMALLEST:g} to {LARGEST:g}."
        )
    for name, right in product((*PER_STAGE, "comm"), (0, SMALLEST, LARGEST)):
        assert getattr(Costs(**{name: right}), name) == right  # type: ignore[arg-type]


def test_the_cost_of_a_hop_is_one_number_for_all() -> None:
    with pytest.raises(ScheduleError, match=r"costs.comm is \(1, 2\): "):
        Costs(comm=(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [(), (1, 2, 3), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("name", PER_STAGE)
def test_a_sequence_of_costs_has_one_value_per_stage(name: str, values: tuple[float, ...]) -> None:
    costs = Costs(**{name: values})  # type: ignore[arg-type]
    measure = costs.memory if name.startswith("until") else costs.ticks
    with pytest.raises(ScheduleError) as caught:
        measure(FOUR.ranks, FOUR.stages)
    assert str(caught.value) == (
        f"costs.{name} has {len(values)} values, but the schedule has 4 stages: "
        "give one value per stage, or one number."
    )


def test_a_list_is_kept_as_it_was_given() -> None:
    given = [1, 2]
    costs = Costs(F=given)
    given.append(3)
    assert costs == Costs(F=(1, 2))
    assert hash(costs) == hash(Costs(F=(1, 2)))


def test_by_default_all_work_costs_one_and_hops_nothing() -> None:
    assert Costs() == Costs(F=1, I=1, W=1, comm=0, until_I=1, until_W=1)


def test_the_tick_divides_every_cost() -> None:
    ticks = Costs(F=0.9, I=(0.3, 0.6, 1.2, 0.3), W=1.5, comm=0.1).ticks(FOUR.ranks, FOUR.stages)
    assert ticks == Ticks(
        Fraction(1, 10),
        {Kind.F: (9,) * 4, Kind.I: (3, 6, 12, 3), Kind.W: (15,) * 4, Kind.B: (18, 21, 27, 18)},
        comm=1,
    )


def test_the_tick_is_the_largest_common_divisor_of_the_costs() -> None:
    assert Costs(F=0.6, I=0.9, W=1.5).ticks(FOUR.ranks, FOUR.stages).tick == Fraction(3, 10)
    assert Costs(F=30, I=60, W=90, comm=15).ticks(FOUR.ranks, FOUR.stages).tick == 15
    assert Costs(F=Fraction(1, 3), I=0, W=0.5).ticks(FOUR.ranks, FOUR.stages).tick == Fraction(1, 6)  # type: ignore[arg-type]


def test_a_chunk_pays_its_part_of_a_number_and_all_of_a_sequence() -> None:
    ticks = Costs(F=1, I=(1, 2, 3, 4, 5, 6), W=0, comm=1).ticks(LOOP.ranks, LOOP.stages)
    assert ticks.tick == Fraction(1, 3)
    assert ticks.durations[Kind.F] == (1,) * 6
    assert ticks.durations[Kind.I] == ticks.durations[Kind.B] == (3, 6, 9, 12, 15, 18)
    assert ticks.durations[Kind.W] == (0,) * 6
    assert ticks.comm == 3  # a hop is a hop, however small the chunk


def test_a_chunk_holds_its_part_of_a_number_and_all_of_a_sequence() -> None:
    assert Costs().memory(LOOP.ranks, LOOP.stages) == MemoryCosts(Fraction(1, 3), (1,) * 6, (1,) * 6)
    holds = Costs(until_I=0.5, until_W=(1, 0, 1, 0, 2, 0)).memory(LOOP.ranks, LOOP.stages)
    assert holds == MemoryCosts(Fraction(1, 6), (1,) * 6, (6, 0, 6, 0, 12, 0))


def test_stages_that_ranks_do_not_divide_evenly_have_equal_costs() -> None:
    uneven = Schedule("uneven", 1, (0, 1, 0), ((), ()))
    assert Costs(F=1, I=1, W=1).ticks(uneven.ranks, uneven.stages).tick == Fraction(2, 3)
    assert Costs().memory(uneven.ranks, uneven.stages) == MemoryCosts(Fraction(2, 3), (1,) * 3, (1,) * 3)


def test_hops_on_one_rank_are_free() -> None:
    ticks = Costs(1, 2, 3, comm=5).ticks(2, 4)
    assert ticks.timing((0, 1, 1, 0)) == Timing(ticks.durations, [0, 10, 0, 10], [10, 0, 10, 0])
    assert ticks.timing((0, 0, 0, 0)) == Timing(ticks.durations, [0] * 4, [0] * 4)
    assert ticks.timing((0, 1, 0, 1)) == Timing(ticks.durations, [0, 10, 10, 10], [10, 10, 10, 0])


def test_all_costs_and_all_held_memory_may_be_zero() -> None:
    ticks = Costs(0, 0, 0).ticks(FOUR.ranks, FOUR.stages)
    assert {*ticks.durations.values()} == {(0,) * 4}
    assert Costs(until_I=0, until_W=0).memory(FOUR.ranks, FOUR.stages) == MemoryCosts(
        Fraction(1), (0,) * 4, (0,) * 4
    )


@pytest.mark.parametrize(
    ("costs", "split", "whole"),
    [
        (Costs(until_I=1, until_W=1), 2, 2),  # both micro-batches, until their weight gradients
        (Costs(until_I=1, until_W=0), 1, 2),  # nothing is left for the weight gradients
        (Costs(until_I=1, until_W=0.25), 1.25, 2),
        (Costs(until_I=1, until_W=3), 6, 4),  # an input gradient leaves more than there was before it
        (Costs(until_I=0, until_W=1), 2, 1),
    ],
)
def test_held_memory_may_shrink_or_grow_with_an_input_gradient(
    costs: Costs, split: float, whole: float
) -> None:
    assert peak("0F0 0I0 0F1 0I1 0W0 0W1", costs) == split
    assert peak("0F0 0F1 0B0 0B1", costs) == whole


def peak(row: str, costs: Costs) -> float:
    """The most that the only rank holds, which does `row`."""
    made = Schedule("written", 2, (0,), (tuple(map(Action.parse, row.split())),))
    return float(*peak_memory(made, costs.memory(made.ranks, made.stages)))


SPLIT = written(["0F0 0F1 0I0 0I1 0W0 0W1"], rank_of=(0,), microbatches=2)
WHOLE = written(["0F0 0F1 0B0 0B1"], rank_of=(0,), microbatches=2)


def test_a_schedule_splits_where_weight_gradients_are_actions() -> None:
    assert (SPLIT.splits, WHOLE.splits, WHOLE.split_backward.splits) == (True, False, True)
    assert SPLIT.split_backward is SPLIT


def test_memory_use_gives_the_amount_during_and_after_each_action() -> None:
    for made, until_input, until_weight, during_and_after in [
        (SPLIT, 1, 1, [(1, 1), (2, 2), (2, 2), (2, 2), (2, 1), (1, 0)]),
        (WHOLE, 1, 1, [(1, 1), (2, 2), (2, 1), (1, 0)]),
        (SPLIT, 3, 1, [(3, 3), (6, 6), (6, 4), (4, 2), (2, 1), (1, 0)]),
        (WHOLE, 3, 1, [(3, 3), (6, 6), (6, 3), (3, 0)]),
        (SPLIT, 1, 3, [(1, 1), (2, 2), (4, 4), (6, 6), (6, 3), (3, 0)]),
        (WHOLE, 1, 3, [(1, 1), (2, 2), (4, 1), (3, 0)]),
        (SPLIT, 1, 0, [(1, 1), (2, 2), (2, 1), (1, 0), (0, 0), (0, 0)]),
        (SPLIT, 0, 1, [(0, 0), (0, 0), (1, 1), (2, 2), (2, 1), (1, 0)]),
    ]:
        holds = MemoryCosts(Fraction(1), (until_input,), (until_weight,))
        assert list(memory_use(made.actions[0], holds)) == during_and_after


def test_memory_of_a_ranks_stages_adds_up() -> None:
    made = written(["0F0 3F0 3B0 0B0", "1F0 2F0 2I0 1B0 2W0"], rank_of=(0, 1, 1, 0), microbatches=1)
    assert Costs().memory(made.ranks, made.stages) == MemoryCosts(Fraction(1, 2), (1,) * 4, (1,) * 4)
    assert peak_memory(made) == (1, 1)
    assert peak_memory(made, MemoryCosts(Fraction(1, 4), (1, 2, 3, 4), (1, 2, 5, 4))) == (
        Fraction(5, 4),
        Fraction(7, 4),
    )


def test_a_rank_without_actions_holds_nothing() -> None:
    assert peak_memory(Schedule("none", 1, (0,), ((), ()))) == (0, 0)


def test_chunks_that_divide_no_decimal() -> None:
    made = policy_schedule("interleaved", 2, 4, 3)
    assert Costs().memory(made.ranks, made.stages).unit == Fraction(1, 3)
    assert peak_memory(made) == (Fraction(7, 3), Fraction(5, 3))


@UNHURRIED
@given(legal_schedules())
def test_a_peak_is_the_most_that_is_alive_at_once(made: Schedule) -> None:
    part = Fraction(made.ranks, made.stages)
    assert peak_memory(made) == tuple(part * max(held_by_intervals(row)) for row in made.actions)


@UNHURRIED
@given(legal_schedules(), st.data())
def test_held_memory_is_the_sum_over_micro_batches(made: Schedule, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 5), min_size=made.stages, max_size=made.stages).map(tuple)
    holds = MemoryCosts(Fraction(1, 2), data.draw(numbers), data.draw(numbers))
    for row in made.actions:
        before = 0
        for place, (action, (during, after)) in enumerate(zip(row, memory_use(row, holds), strict=True)):
            assert after == left(row[: place + 1], holds)
            inputs, weights = holds.until_input[action.stage], holds.until_weight[action.stage]
            turned = before - inputs + weights if action.kind in (Kind.I, Kind.B) else before
            assert during == (after if action.kind is Kind.F else max(before, turned))
            before = after


def left(done: Sequence[Action], holds: MemoryCosts) -> int:
    """What is held once a rank has done so much, by the last thing that happened to each micro-batch."""
    held = {Kind.F: holds.until_input, Kind.I: holds.until_weight}
    last = {(stage, microbatch): kind for stage, kind, microbatch in done}
    return sum(held[kind][stage] for (stage, _), kind in last.items() if kind in held)


def test_a_memory_limit_is_rounded_down_to_whole_units() -> None:
    for limit, unit, units in [
        (4, Fraction(1), 4),
        (3.9, Fraction(1), 3),
        (3.9999999999, Fraction(1), 4),
        (3.99999, Fraction(1), 3),
        (10 / 3, Fraction(1, 3), 10),
        (2 / 3, Fraction(1, 3), 2),
        (3.3333333333, Fraction(1, 3), 10),
        (3.333333, Fraction(1, 3), 9),
        (1e-6, Fraction(1, 10**6), 1),
        (0.9e-6, Fraction(1, 10**6), 0),
        (2.5, Fraction(1, 2), 5),
        (0.1 + 0.2, Fraction(1, 10), 3),
        (0, Fraction(1), 0),
        (1e6, Fraction(1, 4), 4 * 10**6),
    ]:
        assert limit_in_units(limit, unit) == units


def test_a_memory_limit_may_be_infinite() -> None:
    assert limit_in_units(inf, Fraction(1, 7)) == UNLIMITED > 10**18


def test_a_memory_limit_is_a_number_of_at_least_zero() -> None:
    for wrong in [nan, -0.5, -inf, True, "2", None]:
        with pytest.raises(ScheduleError) as caught:
            limit_in_units(wrong, Fraction(1))
        assert str(caught.value) == f"limit is {wrong}: give the most that a rank may hold, in micro-batches."
