"""What went wrong in which rank, in a form that travels, and which of several failures caused the others."""

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
    """One rank's failure.

    `summary` continues "rank 2 ..."; `error` is a pickled `PlaitError`, if it was one, and `frames` is where
    it was raised; `secondary` says that the rank only noticed that a peer was gone; `at` is the host's
    monotonic time in seconds.
    """

    rank: int
    summary: str
    traceback: str = ""
    error: bytes | None = None
    secondary: bool = False
    at: float = 0.0
    frames: str = ""

    def exception(self, others: str = "") -> PlaitError:
        """What the caller sees: the very `PlaitError` that was raised, or a `RankError` with the traceback.

        `others` tells what is known of the other ranks.
        """
        parts = (f"rank {self.rank} {self.summary}", self.traceback.rstrip(), others)
        if self.error is not None and not self.secondary:  # the sentence is the error's own: told once
            parts = (f"rank {self.rank} raised the error that follows", self.frames.rstrip(), others)
        report = RankError("\n\n".join(filter(None, parts)), self.rank, self.traceback)
        if self.error is None:
            return report
        error: PlaitError = pickle.loads(self.error)
        error.__cause__ = report
        return error


def from_exception(rank: int, error: BaseException) -> RankFailure:
    """The failure of a rank whose function raised `error`."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # the first is ours, which called the function
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
    """The failure of a rank whose process ended; `code` is negative for a signal, `stack` where it stood."""
    if code is None:
        summary = "closed its pipe"
    elif code < 0:
        summary = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            summary += " (when it was not you: the system may have run out of memory)"
    else:
        summary = f"ended with exit code {code} before its function returned"
        if code == 255:  # what multiprocessing says where it cannot know
            summary += " (or the process that ranks are forked from was killed)"
    return RankFailure(rank, summary, stack, at=time.monotonic())


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The earliest failure that is not the mere notice of a peer's; else the earliest."""
    return min(failures, key=lambda failure: (failure.secondary, failure.at))


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, PlaitError) or isinstance(error, RankError):
        return None
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None  # its text travels all the same
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
