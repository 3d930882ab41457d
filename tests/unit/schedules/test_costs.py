"""Costs: what is refused, what a chunk pays, what is held when, and that decimal costs are exact."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import product
from math import inf, nan
from typing import Any

import pytest

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import LARGEST, SMALLEST, Costs, MemoryCosts, Ticks, peak_memory
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
