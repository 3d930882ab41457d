"""Errors of operations: why a wait was in vain, who ended first, and how long that is looked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.ranks import gpu_sharing
from plait.ranks.failure.failure_log import FailureRecord, FailureTrace
from plait.ranks.group import Group, Traffic
from plait.ranks.handle import GroupOperation

CLOSED, LATE = RuntimeError("[pair.cc:5] Connection closed by peer [::1]"), RuntimeError("Timed out: 5 ms")
RECORDS = {1: FailureRecord("1F0 from rank 2", (2,)), 2: FailureRecord("all", (0, 1, 3))}
MORE_TIME = "doing, or give the mesh more time."
REASONS: list[tuple[Exception, tuple[int, ...], FailureTrace, str]] = [
    (
        CLOSED,
        (1,),
        FailureTrace({}, (1,)),
        "connection closed by peer; it ended first, so look for its error.",
    ),
    (CLOSED, (1,), FailureTrace({}, ()), "connection closed by peer."),
    (
        CLOSED,
        (1,),
        FailureTrace(RECORDS, (3,)),
        "connection closed by peer; rank 1 waited for 1F0 from rank 2 in vain; rank 2 waited for all in vain"
        "; rank 3 ended first, so look for its error.",
    ),
    (
        CLOSED,
        (1, 2, 3),
        FailureTrace(RECORDS, (3, 4)),
        "connection closed by peer; rank 3 or 4 ended first, so look for its error.",
    ),
    (
        OSError("Broken pipe"),
        (1, 2),
        FailureTrace({}, (1, 2)),
        "connection closed by peer; rank 1 or 2 ended first, so look for its error.",
    ),
    (LATE, (1,), FailureTrace({}, (1,)), f"no answer within 2.5 s; see what that rank is {MORE_TIME}"),
    (LATE, (1,), FailureTrace({}, ()), f"no answer within 2.5 s; see what that rank is {MORE_TIME}"),
    (
        TimeoutError("timeout"),
        (1,),
        FailureTrace({1: RECORDS[1]}, (2,)),
        f"no answer within 2.5 s; rank 1 waited for 1F0 from rank 2 in vain; see what rank 2 is {MORE_TIME}",
    ),
    (LATE, (1, 2), FailureTrace({}, (1, 2)), f"no answer within 2.5 s; see what rank 1 or 2 is {MORE_TIME}"),
    (
        RuntimeError("[enforce at x.cc:7] sizes differ\nframe #0"),
        (1,),
        FailureTrace({}, (1,)),
        "sizes differ",
    ),
    (RuntimeError(""), (1,), FailureTrace({}, (1,)), "RuntimeError"),
]


class Log:
    """Stands in for a failure log, and for the transport."""

    activity: Any = None

    def __init__(self, trace: FailureTrace) -> None:
        self.trace, self.calls = trace, list[Any]()

    def search(self, suspects: tuple[int, ...], patience: float) -> FailureTrace:
        self.calls.append(("search", suspects, patience))
        return self.trace

    def record(self, awaited: str, suspects: tuple[int, ...]) -> None:
        self.calls.append(("record", awaited, suspects))

    def abort(self, cause: Exception) -> None:
        self.calls.append(("abort", cause))


def operation(log: Any, suspects: tuple[int, ...], has_log: bool = True) -> GroupOperation:
    failure_log = log if has_log else None
    group = Group("dp", (5, 1, 2, 3), 0, log, Traffic(), 2.5, failure_log)
    return GroupOperation("a message", suspects, group)


def test_a_failed_operations_error_names_the_cause_and_the_first_failed_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(gpu_sharing._COUNT, raising=False)
    for cause, suspects, trace, told in REASONS:
        log = Log(trace)
        error = operation(log, suspects).error_of(cause)
        assert str(error) == f"rank 5 waits for a message: {told}"
        assert error.__cause__ is cause
        patience = {"connection": 0.5, "no": 3.0}.get(
            told.partition(" ")[0]
        )  # ranks time out at many moments
        assert log.calls == ([] if patience is None else [("search", suspects, patience)])
        supervised = Log(trace)
        supervised.activity = object()  # a supervisor, which sees all ranks, does not wait for this one
        operation(supervised, suspects).error_of(cause)
        assert supervised.calls == []


def test_without_a_failure_log_an_error_names_the_peers() -> None:
    error = operation(SimpleNamespace(), (1,), has_log=False).error_of(CLOSED)
    assert str(error).endswith("closed by peer; it ended first, so look for its error.")


def test_a_failure_is_recorded_before_the_others_are_told() -> None:
    log, cause = Log(FailureTrace({}, ())), RuntimeError("x")
    operation(log, (1, 2)).record_failure(cause)
    assert log.calls == [("record", "a message", (1, 2)), ("abort", cause)]
    log.calls.clear()
    operation(log, (1, 2), has_log=False).record_failure(cause)
    assert log.calls == [("abort", cause)]
