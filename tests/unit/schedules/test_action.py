from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind


@UNHURRIED
@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6)))
def test_text_and_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_text_form() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert Action.parse(" 10W3 ") == Action(10, Kind.W, 3)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 3F0", "2F0x", "2.0F1"])
def test_refuses_other_text(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"is no action: write stage, kind \(F, I, W or B\) and micro-batch"
    ):
        Action.parse(text)
