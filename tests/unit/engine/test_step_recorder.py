"""The recorder of one rank, with a clock that counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from plait.engine.pipeline.executor import Executor
from plait.engine.step_recorder import MeasuredAction, Recorder, Recording
from plait.errors import DataError
from plait.plan.parameter_units import UnitTiming
from plait.ranks.accelerator import CPU
from plait.schedules.action import Action
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import Finish, LayerIndex, LoweringSpec, Program
from plait.schedules.named_schedules import policy_schedule

SHAPE = LoweringSpec((2, 2), {"a": (LayerIndex(0, 0),), "b": (LayerIndex(0, 1),), "c": (LayerIndex(1, 0),)})
EVERYTHING = UnitTiming("each use", "each", True)


@dataclass
class Ticking:
    """One more at each look, and ten more for each instruction that is carried out."""

    now: int

    def stamp(self) -> int:
        self.now += 1
        return self.now

    def read(self, stamps: Sequence[int]) -> list[int]:
        return list(stamps)


def program(policy: str, rank: int, shape: LoweringSpec = SHAPE) -> Program:
    return lower(policy_schedule(policy, 2, 1), shape)[rank]


def recorded(*programs: Program, fails: bool = False) -> Recorder:
    """A recorder that has seen programs run; the last one may fail at its end.

    The clock of the n-th step that trains starts at 1000 n.
    """
    clocks = [Ticking(0)]

    def start_clock() -> Ticking:
        clocks.append(Ticking(1000 * len(clocks)))
        return clocks[-1]

    def handler(instruction: object) -> None:
        clocks[-1].now += 10
        if fails and run is programs[-1] and isinstance(instruction, Finish):
            raise ZeroDivisionError

    recorder = Recorder(start_clock)
    executor = Executor(dict.fromkeys({type(one) for run in programs for one in run}, handler))
    for run in programs:
        expected = pytest.raises(ZeroDivisionError) if fails and run is programs[-1] else nullcontext()
        with expected, recorder.recording_step() as around:
            executor.run(run, around)
    return recorder


def row(recorder: Recorder) -> list[tuple[str, int, int, int | None]]:
    assert recorder.step is not None
    return [(str(action), start, end, asked) for action, start, end, asked in recorder.step()]


def test_a_recorded_action_excludes_its_waits_for_messages() -> None:
    # receive, take, 1021 0F0 0F0 1042, send, 1053 await 0I0 1064, 1065 0B0 1076, reduce b, 1087 0B0 1098, …
    assert row(recorded(program("1f1b", 0))) == [("0F0", 1021, 1042, None), ("0B0", 1065, 1098, 1053)]


def test_a_backward_that_sends_early_is_two_actions() -> None:
    # receive, 1011 await 1F0 1022, 1023 1F0 1F0 loss 1054, 1055 seed 1066, 1067 1I0 1I0 1088, send, 1099 …
    assert row(recorded(program("1f1b", 1))) == [
        ("1F0", 1023, 1054, 1011),
        ("1I0", 1055, 1088, None),
        ("1W0", 1099, 1120, None),
    ]


def test_the_gradient_of_the_loss_is_part_of_its_recorded_backward() -> None:
    alone = lower(policy_schedule("1f1b", 1, 2), LoweringSpec((2,), {}))[0]
    # take, 1011 0F0 0F0 loss 1042, 1043 seed 1054, 1055 0B0 0B0 1076, release, take, 1097 …
    assert row(recorded(alone)) == [
        ("0F0", 1011, 1042, None),
        ("0B0", 1043, 1076, None),
        ("0F1", 1097, 1128, None),
        ("0B1", 1129, 1162, None),
    ]


def test_a_recorded_action_of_several_segments_lasts_from_the_first_to_the_last() -> None:
    sharded = program("zb-h1", 0, replace(SHAPE, timings=dict.fromkeys(SHAPE.units, EVERYTHING)))
    # gather, receive, take, await, gather, 1051 0F0 1062, release, await, 1083 0F0 1094, send, 1105 await …
    assert row(recorded(sharded)) == [
        ("0F0", 1051, 1094, None),
        ("0I0", 1127, 1170, 1105),
        ("0W0", 1191, 1234, None),
    ]


def test_a_recorder_keeps_the_last_training_step() -> None:
    recorder = recorded(program("1f1b", 0), program("1f1b", 0))
    assert row(recorder)[0] == ("0F0", 2021, 2042, None)


def test_a_failed_step_leaves_the_recording_of_the_one_before() -> None:
    first, second = program("1f1b", 0), program("1f1b", 1)
    assert row(recorded(first, second, fails=True)) == row(recorded(first))
    assert recorded(first, fails=True).step is None


def test_a_recording_tells_of_the_latest_step() -> None:
    mesh: Any = SimpleNamespace(device=CPU, group={"pp": SimpleNamespace(size=1)}.__getitem__)
    recording = Recording(mesh, lambda: policy_schedule("1f1b", 1, 1))
    for method in (recording.actions, recording.timeline, recording.costs, recording.waits):
        with pytest.raises(DataError, match="nothing was recorded: call forward_backward"):
            method()
    for milliseconds in (2, 3):
        middle, end = 7 + milliseconds * 1_000_000, 7 + 3 * milliseconds * 1_000_000
        row = (
            MeasuredAction(Action.parse("0F0"), 7, middle, None),
            MeasuredAction(Action.parse("0B0"), middle, end, None),
        )
        recording.recorder.step = partial(tuple, row)
        assert recording.actions() == row
        assert recording.timeline().makespan == 3 * milliseconds
        costs = recording.costs()
        assert {costs.F, costs.I, costs.W} == {(milliseconds,)}
        assert recording.waits() == (0.0,)
