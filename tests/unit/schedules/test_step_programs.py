from __future__ import annotations

import pytest
from schedule_cases import listed, words, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lowering_spec import LayerIndex, LoweringSpec
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.program import AwaitReceive, Send
from plait.schedules.step_programs import StepPrograms

SHAPE = LoweringSpec((1, 1), {"a": (LayerIndex(0, 0),), "b": (LayerIndex(1, 0),)})
STEPS = StepPrograms(policy_schedule("gpipe", 2, 2), SHAPE)


def test_programs_of_one_rank() -> None:
    assert "1W1.0" in words(STEPS.train[1])
    assert words(STEPS.evaluate[1]) == listed("""
        post 1F0<0; await 1F0<0; post 1F1<0; 1F0.0; loss 1F0; release 1F0
        await 1F1<0; 1F1.0; loss 1F1; release 1F1; finish
    """)
    assert words(STEPS.output[1]) == listed("""
        post 1F0<0; await 1F0<0; post 1F1<0; 1F0.0; keep 1F0; release 1F0
        await 1F1<0; 1F1.0; keep 1F1; release 1F1; finish
    """)
    alone = listed("post 1F0<0; await 1F0<0; 1F0.0; keep 1F0; release 1F0; finish")
    assert words(STEPS.output_of_one[1]) == alone


def test_programs_are_made_once() -> None:
    assert STEPS.train is STEPS.train
    assert STEPS.evaluate is STEPS.evaluate


def test_an_illegal_schedule_is_refused_before_it_is_lowered() -> None:
    steps = StepPrograms(written(["0B0 0F0"], rank_of=(0,), microbatches=1), LoweringSpec((1,), {}))
    with pytest.raises(ScheduleError, match="forward, input, weights"):
        _ = steps.train


def test_programs_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule is lowered to such programs; if one were, no rank would wait for ever."""
    first, last = (Action(stage, Kind.F, 0) for stage in (0, 1))
    unreceived = (Send(first, 1),), (AwaitReceive(last, 0),)
    monkeypatch.setattr("plait.schedules.step_programs.lower", lambda *_: unreceived)
    steps = StepPrograms(policy_schedule("gpipe", 2, 1), SHAPE)
    for step in ("train", "evaluate", "output", "output_of_one"):
        with pytest.raises(ScheduleError, match="one order per channel"):
            getattr(steps, step)


def test_a_v_trains_and_evaluates() -> None:
    made = policy_schedule("v-min", 2, 2)
    shape = LoweringSpec((1,) * 4, {str(stage): (LayerIndex(stage, 0),) for stage in range(4)})
    steps = StepPrograms(made, shape)
    assert [word for word in words(steps.train[0]) if "reduce" in word] == ["reduce 3", "reduce 0"]
    assert words(steps.evaluate[0]) == listed("""
        post 3F0<1
        take 0F0; 0F0.0; send 0F0>1; release 0F0
        await 3F0<1; post 3F1<1; 3F0.0; loss 3F0; release 3F0
        take 0F1; 0F1.0; send 0F1>1; release 0F1
        await 3F1<1; 3F1.0; loss 3F1; release 3F1
        finish
    """)
