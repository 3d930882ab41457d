"""The failure of a rank as a picklable report, and the root cause of several failures."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import cloudpickle
import torch.distributed as dist

from plait.errors import CommunicationError, PlaitError, RankError

_SIGNS = ("closed by peer", "reset by peer", "broken pipe", "timed out", "connection refused", "socket")


@dataclass(frozen=True)
class RankFailure:
    """Report of one rank's failure, which can be pickled."""

    rank: int
    summary: str
    """Completes "rank 2 ..."."""
    traceback: str = ""
    error: bytes | None = None
    """The pickled error, if it was a `PlaitError`."""
    secondary: bool = False
    """Whether the rank only noticed that a peer was gone."""
    at: float = 0.0
    """The host's monotonic time, in seconds."""
    frames: str = ""
    """The stack where `error` was raised."""

    def exception(self, others: str = "") -> PlaitError:
        """Return the `PlaitError` that the rank raised, else a `RankError` with the traceback.

        `others` describes what the other ranks were doing, for the message.
        """
        parts = (f"rank {self.rank} {self.summary}", self.traceback.rstrip(), others)
        if self.error is not None and not self.secondary:  # its message is not repeated here
            parts = (f"rank {self.rank} raised the error that follows", self.frames.rstrip(), others)
        report = RankError("\n\n".join(filter(None, parts)), self.rank, self.traceback)
        if self.error is None:
            return report
        error: PlaitError = pickle.loads(self.error)
        error.__cause__ = report
        return error


def from_exception(rank: int, error: BaseException) -> RankFailure:
    """Return the failure of a rank whose function raised `error`."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # the first frame is plait's own
    lines = traceback.format_exception(type(error), error, frames)
    name = "".join(traceback.format_exception_only(error)).strip()
    return RankFailure(
        rank,
        f"failed: {name}",
        "".join(lines),
        _pickled(error),
        _is_secondary(error),
        time.monotonic(),
        "".join(traceback.format_tb(frames)),
    )


def from_exit(rank: int, code: int | None, stack: str) -> RankFailure:
    """Return the failure of a rank whose process ended with `code` (negative: a signal) and stack `stack`."""
    if code is None:
        summary = "closed its pipe"
    elif code < 0:
        summary = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            summary += " (when it was not you: the system may have run out of memory)"
    else:
        summary = f"ended with exit code {code} before its function returned"
        if code == 255:  # multiprocessing's code where the real one is unknown
            summary += " (or the process that ranks are forked from was killed)"
    return RankFailure(rank, summary, stack, at=time.monotonic())


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the earliest failure that is not a consequence of another rank's, else the earliest."""
    return min(failures, key=lambda failure: (failure.secondary, failure.at))


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, PlaitError) or isinstance(error, RankError):
        return None
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None  # the traceback holds its text
    return data


def _is_secondary(error: BaseException) -> bool:
    return any(
        isinstance(link, CommunicationError | dist.DistError)
        or (isinstance(link, RuntimeError | OSError) and any(sign in str(link).lower() for sign in _SIGNS))
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
