"""A handle: an operation that has started, and the one place where it is waited for."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from plait.comm.group import Group
from plait.errors import CommunicationError

T = TypeVar("T")


class Waiting(Protocol):
    """What has been started: a `Work` of `torch.distributed`, or a wait of ours."""

    def wait(self) -> object:
        """Return when it is done; raise `RuntimeError` or `OSError` when it failed."""


class Handle(Generic[T]):
    """A running operation. Keep it and `wait()` for it: it keeps the tensors alive that are on their way.

    On NCCL waiting orders streams and does not block the host; on Gloo it blocks, for at most the
    group's timeout.
    """

    def __init__(
        self, start: Callable[[], Waiting | None], finish: Callable[[], T], awaited: str, group: Group
    ) -> None:
        """Start the operation by `start()`; `finish()` makes the result of `wait()` and holds the tensors.

        `awaited` completes the sentence "rank 1 waits for ...". A failure to start is raised by `wait()`.
        """
        self._group = group
        self._awaited = awaited
        self._finish: Callable[[], T] | None = finish
        self._work: Waiting | None = None
        self._result: list[T] = []
        self._error: CommunicationError | None = None
        try:
            self._work = start()
        except (RuntimeError, OSError) as cause:
            self._fail(cause)

    @classmethod
    def done(cls, result: T, group: Group) -> Handle[T]:
        """A handle whose operation needed nobody else."""
        return cls(lambda: None, lambda: result, "nothing", group)

    def wait(self) -> T:
        """The result, once it is there; a second call gives the same result, or raises the same error.

        Raises `CommunicationError` that names the operation, this rank, the peer or the group, and the cause,
        when a peer is gone or has not come within the group's timeout. The group is of no use afterwards.
        """
        if self._finish is not None:
            try:
                if self._work is not None:
                    self._work.wait()
            except (RuntimeError, OSError) as cause:
                self._fail(cause)
            else:
                self._result.append(self._finish())
                self._work = self._finish = None
        if self._error is not None:
            raise self._error
        return self._result[0]

    def abandon(self) -> bool:
        """Nobody needs the result. Whether nothing reads or writes the tensors any more; else `wait` in time.

        What a backend has started goes on by itself; what ranks of one host show each other is read and
        written only by those who wait.
        """
        if self._work is not None and hasattr(self._work, "abandon"):
            with suppress(OSError):  # after another error the lines are closed
                self._work.abandon()
            self._work = None
        if self._work is None:
            self._finish = None
        return self._work is None

    def _fail(self, cause: Exception) -> None:
        group = self._group
        sentence = f"rank {group.rank} waits for {self._awaited}: {_reason(cause, group.timeout)}"
        self._error = CommunicationError(sentence)
        self._error.__cause__ = cause
        self._work = self._finish = None
        group.fail(cause)


def _reason(cause: Exception, timeout: float) -> str:
    text = str(cause).strip()
    lowered = text.lower()
    if any(sign in lowered for sign in ("closed by peer", "connection reset", "broken pipe", "remote peer")):
        return "connection closed by peer; it ended first, so look for its error."
    if "timed out" in lowered or "timeout" in lowered:
        return f"no answer within {timeout:g} s; see what that rank is doing, or give the mesh more time."
    first_line = text.splitlines()[0] if text else type(cause).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", first_line)
