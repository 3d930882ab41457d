"""`Handle`: a started communication operation, whose `wait` returns its result or raises its error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from plait.errors import CommunicationError
from plait.ranks.failure.failure_log import FailureTrace
from plait.ranks.gpu_sharing import hang_hint
from plait.ranks.group import Group
from plait.ranks.transport.interface import Pending

_PATIENCE = 0.5
"""Seconds for other ranks to write their failure records, after a connection was closed."""
_PATIENCE_AFTER_TIMEOUT = 3.0
"""The same after a timeout: ranks time out at different moments."""


@dataclass(frozen=True)
class GroupOperation:
    """Description of a started communication operation, for error messages. It holds no tensors."""

    awaited: str
    """Completes "rank 1 waits for ..."."""
    suspects: tuple[int, ...]
    """The global ranks that it depends on."""
    group: Group

    def record_failure(self, cause: Exception) -> None:
        """Write this rank's failure to the log, and make the group's other operations fail soon."""
        if self.group.failure_log is not None:
            self.group.failure_log.record(self.awaited, self.suspects)
        if self.group.transport is not None:
            self.group.transport.abort(cause)

    def error_of(self, cause: Exception) -> CommunicationError:
        """Return the error to raise for `cause`; search the failure log for the rank that failed first.

        The search takes at most `FailureLog.seconds_left`; there is none where a supervisor sees all ranks.
        """
        group, timed_out = self.group, _is_timeout(cause)
        trace, log = FailureTrace({}, self.suspects), group.failure_log
        if log is not None and log.activity is None and (timed_out or _is_closed(cause)):
            patience = _PATIENCE_AFTER_TIMEOUT if timed_out else _PATIENCE
            trace = log.search(self.suspects, patience)
        reason = _reason(cause, group.timeout, self.suspects, trace)
        error = CommunicationError(f"rank {group.rank} waits for {self.awaited}: {reason}")
        error.__cause__ = cause
        return error


def _is_closed(cause: Exception) -> bool:
    signs = ("closed by peer", "connection reset", "broken pipe", "remote peer")
    return any(sign in str(cause).lower() for sign in signs)


def _is_timeout(cause: Exception) -> bool:
    return "timed out" in str(cause).lower() or "timeout" in str(cause).lower()


def _reason(cause: Exception, timeout: float, suspects: tuple[int, ...], trace: FailureTrace) -> str:
    """Return the part of an error message that says why an operation failed and which ranks caused it."""
    between = ""
    if len(suspects) == 1:  # several suspects mostly waited for this same operation
        between = "".join(
            f"; rank {rank} waited for {record.awaited} in vain" for rank, record in trace.records.items()
        )
    silent = trace.silent
    culprit = f"rank {' or '.join(map(str, silent))}" if silent else ""
    if silent == suspects and len(silent) == 1:
        culprit = "it"
    if _is_closed(cause):
        first = f"; {culprit} ended first, so look for its error" if culprit else ""
        return f"connection closed by peer{between}{first}."
    if _is_timeout(cause):
        whom = "that rank is" if culprit in ("", "it") else f"{culprit} is"
        first = f"no answer within {timeout:g} s{between}; see what {whom} doing, or give the mesh more time."
        return first + hang_hint()
    text = str(cause).strip()
    first_line = text.splitlines()[0] if text else type(cause).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", first_line)


T = TypeVar("T")


class Handle(Generic[T]):
    """A started communication operation. Keep it until `wait()`: it keeps the operation's tensors alive.

    What ranks of one host copied to shared memory for it is kept until its wait, or that of a later operation
    of the group, or until 256 MiB are full; other ranks wait for its reductions in shared memory in vain.
    On NCCL waiting orders streams and does not block the host; on Gloo it blocks, for at most the
    group's timeout.
    """

    def __init__(
        self,
        start: Callable[[], Pending | None],
        finish: Callable[[], T],
        awaited: str,
        group: Group,
        peer: int | None = None,
    ) -> None:
        """Call `start()` to start the operation; `wait()` then returns the result of `finish()`.

        `finish` also keeps the operation's tensors alive. `awaited` completes "rank 1 waits for ...". `peer`
        is the only rank that the operation depends on, by default all ranks of the group. A failure to start
        is raised by `wait()`.
        """
        self._group = group
        self._awaited = awaited
        self._about = ""
        self._suspects = group.others if peer is None else (peer,)
        self._cause: Exception | None = None
        self._finish: Callable[[], T] | None = finish
        self._work: Pending | None = None
        self._result: list[T] = []
        self._error: CommunicationError | None = None
        try:
            self._work = start()
        except (RuntimeError, OSError) as cause:
            self._fail(cause)

    @classmethod
    def done(cls, result: T, group: Group) -> Handle[T]:
        """Return the handle of an operation that is already complete with `result`."""
        return cls(lambda: None, lambda: result, "nothing", group)

    def about(self, what: str) -> Self:
        """Set what the operation is for, as text that its errors show; return this handle."""
        self._about = f" ({what})"
        return self

    def wait(self) -> T:
        """Block until the result is available and return it; later calls return or raise the same.

        Raises `CommunicationError` when a peer is gone or does not take part within the group's timeout. The
        error names the operation, this rank, the peer or the group, the cause, and the rank that failed first
        where it is another one than the peer. The group cannot be used afterwards.
        """
        if self._finish is not None:
            try:
                if self._work is not None:
                    traffic, log = self._group.traffic, self._group.failure_log
                    activity = None if log is None else log.activity
                    if activity is not None:
                        activity.begin_wait(self._awaited + self._about)
                    start = time.perf_counter_ns()
                    before = traffic.stamp() if traffic.stamp else None
                    self._work.wait(self._awaited + self._about)
                    traffic.record_wait(self._group.name, start, time.perf_counter_ns())
                    if traffic.stamp:
                        traffic.stamped_waits.append((before, traffic.stamp()))
                    if activity is not None:
                        activity.end_wait()
            except (RuntimeError, OSError) as cause:
                self._fail(cause)
            else:
                self._result.append(self._finish())
                self._work = self._finish = None
                if self._group.operation_watch is not None:
                    self._group.operation_watch.add(self._operation)
        if self._cause is not None and self._error is None:
            self._error = self._operation.error_of(self._cause)
        if self._error is not None:
            raise self._error
        return self._result[0]

    def abandon(self) -> bool:
        """Discard the result; return True if the operation's tensors can be reused now; else `wait` first.

        An operation of a backend runs on by itself; staged tensors of ranks on one host are read and written
        in `wait` only.
        """
        if self._work is not None and self._work.abandon():
            self._work = None
        if self._work is None:
            self._finish = None
        return self._work is None

    def _fail(self, cause: Exception) -> None:
        self._cause = cause
        self._work = self._finish = None
        self._operation.record_failure(cause)

    @property
    def _operation(self) -> GroupOperation:
        return GroupOperation(self._awaited + self._about, self._suspects, self._group)
