"""`RankFailure`: a report of one rank's failure; and the root cause of several."""

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
    is_final: bool = False
    """Whether the function, called again, would fail likewise: its result cannot be sent."""
    is_world_change: bool = False
    """Whether nothing failed: all ranks have left their world between two steps, for one of more ranks."""

    def exception(self, others: str = "") -> PlaitError:
        """Return the `PlaitError` that the rank raised, else a `RankError` with the traceback.

        `others` describes what the other ranks were doing, for the message.
        """
        error = None if self.error is None else _unpickled(self.error)
        parts = (f"rank {self.rank} {self.summary}", self.traceback.rstrip(), others)
        if error is not None and not self.secondary:  # its message is not repeated here
            parts = (f"rank {self.rank} raised the error that follows", self.frames.rstrip(), others)
        report = RankError("\n\n".join(filter(None, parts)), self.rank, self.traceback)
        if error is None:
            return report
        error.__cause__ = report
        return error


def from_exception(rank: int, error: BaseException) -> RankFailure:
    """Return the failure of a rank whose function raised `error`."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # the first frame is plait's own
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = f"failed: {''.join(traceback.format_exception_only(error)).strip()}"
    stack = "".join(traceback.format_tb(frames))
    at, secondary = time.monotonic(), is_secondary(error)
    return RankFailure(rank, summary, text, _pickled(error), secondary, at, stack)


def from_exit(rank: int, code: int | None, stack: str) -> RankFailure:
    """Return the failure of a rank whose process ended with `code`, which is below 0 for a signal.

    `code` None: it has only closed its pipe. `stack`: the stack that it wrote before, or "".
    """
    if code is None:
        summary = "closed its pipe"
    elif code < 0:
        summary = f"was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            summary += " (when it was not you: the system may have run out of memory)"
    else:
        summary = f"ended with exit code {code} before its function returned"
        if code == 255:  # multiprocessing's code where the real one is unknown
            summary += " (or the process that ranks are forked from was killed)"
    return RankFailure(rank, summary, stack, at=time.monotonic())


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the earliest of the failures that no other rank's failure caused, else the earliest of all."""
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


def _unpickled(error: bytes) -> PlaitError | None:
    """Return a rank's error; None where its class cannot be imported in this process."""
    try:
        found = pickle.loads(error)
    except Exception:  # of the user's class
        return None
    return found if isinstance(found, PlaitError) else None


def _signal_name(number: int) -> str:
    """Return the name of a signal; its number where it has none, as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone, or does not answer."""
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
