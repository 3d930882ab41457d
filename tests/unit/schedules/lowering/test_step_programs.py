from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_cases import listed, words, written

from plait.engine.blueprint import StepPrograms
from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import AwaitReceive, LayerIndex, LoweringSpec, Send
from plait.schedules.named_schedules import policy_schedule

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
    monkeypatch.setattr("plait.engine.blueprint.lower", lambda *_: unreceived)
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


def test_on_nccl_receives_are_posted_one_action_ahead() -> None:
    steps = StepPrograms(policy_schedule("1f1b", 2, 2), LoweringSpec((1, 1), {}))
    assert words(steps.posting_late().evaluate[1]) == listed("""
        post 1F0<0; await 1F0<0; post 1F1<0; 1F0.0; loss 1F0; release 1F0
        await 1F1<0; 1F1.0; loss 1F1; release 1F1; finish
    """)
    assert words(steps.train[0])[:2] == listed("post 0I0<1; take 0F0")
    assert words(steps.posting_late().train[0])[:1] == listed("take 0F0")


def test_on_nccl_receives_are_posted_early_where_late_ones_would_deadlock() -> None:
    """Rank 0 waits for 0F1 to be received before it sends 0F3; rank 1 would post that after 1B0's input."""
    rows = [
        "0F0 2F0 0F1 0F2 0F3 2B0 0B0 2F1 2F2 2F3 2B1 2B2 2B3 0B1 0B2 0B3",
        "1F0 3F0 3B0 1B0 1F1 1F2 1F3 3F1 3F2 3F3 3B1 3B2 3B3 1B1 1B2 1B3",
    ]
    made = written(rows, rank_of=(0, 1, 0, 1), microbatches=4)
    steps = StepPrograms(made, LoweringSpec((1,) * 4, {}))
    late = lower(made, replace(steps.spec, posts_late=True))
    with pytest.raises(ScheduleError, match="no deadlock on GPU streams"):
        check_programs(late, rendezvous=False)
    assert steps.posting_late().train == steps.train
