"""A handle: an operation that has started, and the one place where it is waited for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from plait.comm.group import Group
from plait.comm.last_words import Account, ended_by
from plait.comm.transport.interface import Pending
from plait.errors import CommunicationError

T = TypeVar("T")

_PATIENCE = 0.5
"""Seconds for other ranks to say whom they waited for, after a connection was closed."""
_PATIENCE_AFTER_TIMEOUT = 3.0
"""The same after a timeout, which strikes not all of them at once."""


class Handle(Generic[T]):
    """A running operation. Keep it and `wait()` for it: it keeps the tensors alive that are on their way.

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
        """Start the operation by `start()`; `finish()` makes the result of `wait()` and holds the tensors.

        `awaited` completes the sentence "rank 1 waits for ...", and `peer` is the one rank that it can come
        from, if not any of the group. A failure to start is raised by `wait()`.
        """
        self._group = group
        self._awaited = awaited
        self._about = ""
        self._suspects = (
            tuple(rank for rank in group.ranks if rank != group.rank) if peer is None else (peer,)
        )
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
        """A handle whose operation needed nobody else."""
        return cls(lambda: None, lambda: result, "nothing", group)

    def about(self, what: str) -> Self:
        """The same handle, whose errors say what the operation is for."""
        self._about = f" ({what})"
        return self

    def wait(self) -> T:
        """The result, once it is there; a second call gives the same result, or raises the same error.

        Raises `CommunicationError` that names the operation, this rank, the peer or the group, and the cause,
        when a peer is gone or has not come within the group's timeout; and the rank that ended all, where it
        is another one than the peer. The group is of no use afterwards.
        """
        if self._finish is not None:
            try:
                if self._work is not None:
                    self._work.wait(self._awaited + self._about)
            except (RuntimeError, OSError) as cause:
                self._fail(cause)
            else:
                self._result.append(self._finish())
                self._work = self._finish = None
        if self._cause is not None and self._error is None:
            self._error = self._told(self._cause)
        if self._error is not None:
            raise self._error
        return self._result[0]

    def abandon(self) -> bool:
        """Nobody needs the result. Whether nothing reads or writes the tensors any more; else `wait` in time.

        What a backend has started goes on by itself; what ranks of one host show each other is read and
        written only by those who wait.
        """
        if self._work is not None and self._work.abandon():
            self._work = None
        if self._work is None:
            self._finish = None
        return self._work is None

    def _fail(self, cause: Exception) -> None:
        self._cause = cause
        self._work = self._finish = None
        if self._group.words is not None:
            self._group.words.say(f"{self._awaited}{self._about}", self._suspects)
        self._group.abort(cause)

    def _told(self, cause: Exception) -> CommunicationError:
        group, timed_out = self._group, _is_timeout(cause)
        account = Account({}, self._suspects)
        if group.words is not None and (timed_out or _is_closed(cause)):
            account = group.words.ask(self._suspects, _PATIENCE_AFTER_TIMEOUT if timed_out else _PATIENCE)
        reason = _reason(cause, group.timeout, self._suspects, account)
        error = CommunicationError(f"rank {group.rank} waits for {self._awaited}{self._about}: {reason}")
        error.__cause__ = cause
        return error


def _is_closed(cause: Exception) -> bool:
    signs = ("closed by peer", "connection reset", "broken pipe", "remote peer")
    return any(sign in str(cause).lower() for sign in signs)


def _is_timeout(cause: Exception) -> bool:
    return "timed out" in str(cause).lower() or "timeout" in str(cause).lower()


def _reason(cause: Exception, timeout: float, suspects: tuple[int, ...], account: Account) -> str:
    """What went wrong, and who it was: `suspects` are those that an answer could have come from."""
    between = ""
    if len(suspects) == 1:  # else all that they waited for is this very operation, mostly
        between = "".join(
            f"; rank {rank} waited for {words.awaited} in vain" for rank, words in account.said.items()
        )
    silent = account.silent
    culprit = "it" if silent == suspects and len(silent) == 1 else ended_by(silent) if silent else ""
    if _is_closed(cause):
        told = f"; {culprit} ended first, so look for its error" if culprit else ""
        return f"connection closed by peer{between}{told}."
    if _is_timeout(cause):
        whom = "that rank is" if culprit in ("", "it") else f"{culprit} is"
        return f"no answer within {timeout:g} s{between}; see what {whom} doing, or give the mesh more time."
    text = str(cause).strip()
    first_line = text.splitlines()[0] if text else type(cause).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", first_line)
