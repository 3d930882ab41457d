"""Costs: what is refused, what a chunk pays, and that decimal costs are exact."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.policies import schedule
from plait.schedules.schedule import Schedule
from plait.simulation.costs import Costs

FOUR = schedule("1f1b", ranks=4, microbatches=1)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"F": -1}, "costs.F is -1: give a finite number of at least 0."),
        ({"W": float("nan")}, "costs.W is nan: "),
        ({"comm": float("inf")}, "costs.comm is inf: "),
        ({"I": "1"}, r"costs.I\[0\] is '1': "),
        ({"I": (1, -2)}, r"costs.I\[1\] is -2: "),
        ({"F": True}, "costs.F is True: "),
        ({"comm": (1, 2)}, r"costs.comm is \(1, 2\): "),
    ],
)
def test_refuses_what_is_no_time(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs(**costs)


def test_a_sequence_has_one_value_per_stage() -> None:
    message = "costs.W has 3 values, but the schedule has 4 stages: give one value per stage, or one number."
    with pytest.raises(ScheduleError, match=message):
        Costs(W=(1, 2, 3)).ticks(FOUR)


def test_a_list_is_kept_as_it_was_given() -> None:
    given = [1, 2]
    costs = Costs(F=given)
    given.append(3)
    assert costs == Costs(F=(1, 2))
    assert hash(costs) == hash(Costs(F=(1, 2)))


def test_ticks_divide_every_cost() -> None:
    ticks = Costs(F=0.9, I=(0.3, 0.6, 1.2, 0.3), W=1.5, comm=0.1).ticks(FOUR)
    assert ticks.tick == Fraction(1, 10)
    assert (ticks.forward, ticks.inputs, ticks.weights) == ((9,) * 4, (3, 6, 12, 3), (15,) * 4)
    assert ticks.comm == 1
    assert [ticks.duration(Action.parse(text)) for text in ("1F0", "1I0", "1W0", "1B0")] == [9, 6, 15, 21]


def test_a_chunk_pays_its_part_of_a_number_and_all_of_a_sequence() -> None:
    loop = Schedule("loop", 1, (0, 1, 0, 1, 0, 1), ((), ()))
    ticks = Costs(F=1, I=(1, 2, 3, 4, 5, 6), W=0, comm=1).ticks(loop)
    assert ticks.tick == Fraction(1, 3)
    assert ticks.forward == (1,) * 6
    assert ticks.inputs == (3, 6, 9, 12, 15, 18)
    assert ticks.comm == 3


def test_nothing_may_cost_nothing() -> None:
    assert Costs(0, 0, 0).ticks(FOUR).forward == (0,) * 4
