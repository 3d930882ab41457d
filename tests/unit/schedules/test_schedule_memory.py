"""What ranks hold, against literals and against intervals."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, held_by_intervals, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import (
    UNLIMITED,
    MemoryCosts,
    even_memory_costs,
    limit_in_units,
    memory_use,
    peak_memory,
)
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

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
    assert even_memory_costs(made) == MemoryCosts(Fraction(1, 2), (1,) * 4, (1,) * 4)
    assert peak_memory(made) == (1, 1)
    assert peak_memory(made, MemoryCosts(Fraction(1, 4), (1, 2, 3, 4), (1, 2, 5, 4))) == (
        Fraction(5, 4),
        Fraction(7, 4),
    )


def test_a_rank_without_actions_holds_nothing() -> None:
    assert peak_memory(Schedule("none", 1, (0,), ((), ()))) == (0, 0)


def test_chunks_that_divide_no_decimal() -> None:
    made = policy_schedule("interleaved", 2, 4, 3)
    assert even_memory_costs(made).unit == Fraction(1, 3)
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
