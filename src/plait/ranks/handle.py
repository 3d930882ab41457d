"""A handle: a communication operation that has started, and a method to wait for its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from plait.errors import CommunicationError
from plait.ranks.group import Group
from plait.ranks.operation_error import GroupOperation
from plait.ranks.transport.interface import Pending

T = TypeVar("T")


class Handle(Generic[T]):
    """A started communication operation. Keep it until `wait()`: it keeps the operation's tensors alive.

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
        """Set the purpose of the operation, shown in its errors; return this handle."""
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
                    start = time.perf_counter_ns()
                    self._work.wait(self._awaited + self._about)
                    self._group.traffic.record_wait(self._group.name, start, time.perf_counter_ns())
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
