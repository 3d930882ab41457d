"""The error of a failed operation: the operation, the cause, and the rank that failed first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.errors import CommunicationError
from plait.ranks.failure.failures import FailureTrace
from plait.ranks.group import Group
from plait.ranks.launch.ranks_per_gpu import hang_hint

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
        """Write this rank's record to the failure log, and make the group's other operations fail soon."""
        if self.group.failure_log is not None:
            self.group.failure_log.record(self.awaited, self.suspects)
        self.group.abort(cause)

    def error_of(self, cause: Exception) -> CommunicationError:
        """Return the error to raise for `cause`; search the failure log for the rank that failed first.

        The search takes at most `FailureLog.seconds_left`.
        """
        group, timed_out = self.group, _is_timeout(cause)
        trace = FailureTrace({}, self.suspects)
        if group.failure_log is not None and (timed_out or _is_closed(cause)):
            patience = _PATIENCE_AFTER_TIMEOUT if timed_out else _PATIENCE
            trace = group.failure_log.search(self.suspects, patience)
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
