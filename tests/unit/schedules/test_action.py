from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind


@UNHURRIED
@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6)))
def test_an_action_survives_conversion_to_text_and_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_the_text_of_an_action_is_stage_kind_and_micro_batch() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert Action.parse(" 10W3 ") == Action(10, Kind.W, 3)


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 3F0", "2F0x", "2.0F1", "1234567890F0"]
)
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"is not an action: write stage, kind \(F, I, W or B\) and micro-batch"
    ):
        Action.parse(text)


def test_an_action_is_its_three_parts_and_sorts_by_them() -> None:
    stage, kind, microbatch = Action(2, Kind.F, 0)
    assert (stage, kind, microbatch) == (2, "F", 0)
    assert sorted(map(Action.parse, ["1F0", "0W0", "0F1", "0F0"])) == [
        *map(Action.parse, ["0F0", "0F1", "0W0", "1F0"])
    ]
    assert Action(2, Kind.F, 0)._replace(microbatch=1) == Action.parse("2F1")
    assert hash(Kind.F) == hash("F")


SOURCES = {"0F3": None, "1F3": 0, "2F3": 1, "2I3": None, "2B3": None, "1I3": 2, "0B3": 1, "1W3": None}
CONSUMERS = {"0F3": "1F3", "2F3": None, "2I3": "1I3", "1B3": "0I3", "0I3": None, "0B3": None, "1W3": None}


@pytest.mark.parametrize("text", SOURCES)
def test_the_source_stage_of_each_action_among_three_stages_is_the_listed_one(text: str) -> None:
    assert Action.parse(text).source_stage(stages=3) == SOURCES[text]


@pytest.mark.parametrize("text", CONSUMERS)
def test_the_consumer_of_each_action_among_three_stages_is_the_listed_one(text: str) -> None:
    consumer = Action.parse(text).consumer(stages=3)
    assert (consumer and str(consumer)) == CONSUMERS[text]


def test_actions_of_a_single_stage_have_no_source_and_no_consumer() -> None:
    for kind in Kind:
        assert Action(0, kind, 0).source_stage(stages=1) is None
        assert Action(0, kind, 0).consumer(stages=1) is None
