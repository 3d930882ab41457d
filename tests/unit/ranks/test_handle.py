"""What the host does to start an operation."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any
from unittest.mock import Mock, call
from weakref import ref

import pytest
import torch

from plait.errors import CommunicationError
from plait.ranks import Group, Handle, Traffic, all_reduce
from plait.ranks.failure.failure_log import FailureTrace
from plait.ranks.handle import GroupOperation


def group_of(ranks: int) -> Group:
    """A group of `ranks` ranks whose operations do nothing."""
    return Group("dp", tuple(range(ranks)), 1, Mock(shares=lambda tensor: False), Traffic(), 1.0)


def calls_to_start(ranks: int) -> int:
    """Calls of Python functions, generators' turns included, that start the second operation of a group."""
    group, calls = group_of(ranks), 0
    all_reduce(torch.zeros(2), group, checked=False)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        all_reduce(torch.zeros(2), group, checked=False)
    finally:
        sys.setprofile(None)
    return calls


def test_starting_an_operation_does_no_more_work_in_a_larger_group() -> None:
    assert calls_to_start(2) == calls_to_start(512)


def test_a_group_lists_the_other_ranks() -> None:
    group = group_of(3)
    assert group.others == (0, 2)
    assert group.with_others == "dp with 0, 2"


class Started:
    """Stands in for an operation of a transport."""

    def __init__(self, waits: list[str]) -> None:
        self.waits = waits

    def wait(self, awaited: str = "") -> None:
        self.waits.append(awaited)

    def abandon(self) -> bool:
        return False


def watched_group() -> Any:
    """A group whose failure log, transport and watch only note their calls."""
    log = Mock(search=Mock(return_value=FailureTrace({}, ())), activity=None)
    return Group("dp", (4, 1, 7), 1, Mock(), Traffic(), 1.0, log, operation_watch=Mock())


def test_a_result_is_made_once_by_a_wait_that_is_counted_and_watched() -> None:
    group, waits, finish = watched_group(), list[str](), Mock(return_value=[5])
    group.traffic.waits = []
    started: Any = [Started(waits)]
    gone = ref(started[0])
    handle = Handle(started.pop, finish, "a sum over dp", group).about("the loss")
    assert (waits, finish.mock_calls) == ([], [])
    result = handle.wait()
    assert result == [5]
    assert handle.wait() is result
    assert waits == ["a sum over dp (the loss)"]
    assert finish.mock_calls == [call()]
    assert [axis for axis, _, _ in group.traffic.waits] == ["dp"]
    operation = GroupOperation("a sum over dp (the loss)", (4, 7), group)
    assert group.operation_watch.mock_calls == [call.add(operation)]
    assert gone() is None, "the handle keeps nothing of what is over"
    assert Handle.done("at once", group).wait() == "at once"
    assert len(group.traffic.waits) == 1
    group.failure_log.record.assert_not_called()


def test_a_supervisor_is_told_when_a_wait_begins_and_ends() -> None:
    group = watched_group()
    told = group.failure_log.activity = Mock()
    Handle(lambda: told.started, lambda: 5, "a sum over dp", group).about("the loss").wait()
    about = "a sum over dp (the loss)"
    assert told.mock_calls == [call.begin_wait(about), call.started.wait(about), call.end_wait()]


@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_failure_is_recorded_at_once_and_raised_by_each_wait(when: str) -> None:
    cause = {"start": RuntimeError("closed by peer"), "wait": OSError("closed by peer")}[when]
    group, pending, finish = watched_group(), Mock(wait=Mock(side_effect=cause)), Mock()
    start = Mock(side_effect=cause) if when == "start" else lambda: pending
    handle: Handle[Any] = Handle(start, finish, "a message", group, 9)
    assert group.failure_log.record.call_count == (when == "start")
    handle.about("1F0")
    with pytest.raises(CommunicationError, match=r"^rank 1 waits for a message \(1F0\): ") as first:
        handle.wait()
    assert first.value.__cause__ is cause
    with pytest.raises(CommunicationError) as second:
        handle.wait()
    assert second.value is first.value
    awaited = "a message" if when == "start" else "a message (1F0)"
    assert group.failure_log.mock_calls == [call.record(awaited, (9,)), call.search((9,), 0.5)]
    assert group.transport.mock_calls == [call.abort(cause)]
    finish.assert_not_called()
    group.operation_watch.add.assert_not_called()
    assert handle.abandon(), "nothing is pending"


def test_an_operation_that_cannot_be_cancelled_is_still_waited_for() -> None:
    pending, finish = Mock(abandon=Mock(side_effect=[False, True])), Mock()
    handle = Handle(lambda: pending, finish, "a message", watched_group())
    assert [handle.abandon(), handle.abandon(), handle.abandon()] == [False, True, True]
    assert pending.mock_calls == [call.abandon()] * 2
    other = Handle(lambda: Started([]), lambda: 5, "a message", watched_group())
    assert not other.abandon()
    assert other.wait() == 5
