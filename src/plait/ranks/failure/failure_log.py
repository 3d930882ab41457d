"""Failures of ranks: as a report, in a log that all ranks can read, and the root cause of several of them.

When a rank ends, only the ranks waiting for it notice. They end in turn, others notice that, and so on:
most would blame a rank that only did the same. So a rank that fails first records which ranks it waited for,
in the store of the rendezvous, and then follows the records of others to the ranks that left none.
"""

from __future__ import annotations

import json
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import cloudpickle
import torch.distributed as dist

from plait.errors import CommunicationError, PlaitError, RankError
from plait.ranks.failure.rank_activity import activity_file_of_rank
from plait.ranks.run_store import is_gone, within

T = TypeVar("T")

_POLL_PERIOD = 0.01
_PATIENCE_WITH_SEVERAL = 3.0
"""Seconds to wait where several ranks have no record, since most of them will still write one."""
_MOST_SECONDS = 8.0
"""Seconds from the first failed operation of a rank until its search ends, at most."""
_SHARE_OF_TIMEOUT = 0.1
"""The same as a share of the timeout, so that a rank with a short one does not search for long."""


@dataclass(frozen=True)
class FailureRecord:
    """What a rank wrote when it failed: the operation it waited for, and the ranks it waited for."""

    awaited: str
    """Completes "rank 1 waited for ..."."""
    suspects: tuple[int, ...]
    """The ranks that could have failed to take part."""
    culprits: tuple[int, ...] | None = None
    """The ranks that this rank's own search ended at; None while it has not searched yet."""


@dataclass(frozen=True)
class FailureTrace:
    """The failure records that `FailureLog.search` found, by rank, and the ranks without a record."""

    records: Mapping[int, FailureRecord]
    silent: tuple[int, ...]


class FailureLog:
    """One rank's access to the failure records of all ranks of a mesh. Nothing is written until a failure.

    All waits for the store after the first failure share one deadline: a store whose host is gone, or cut
    off, never answers, and each wait for it would add to the timeout that has already passed.
    """

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, timeout: float = 600.0) -> None:
        """Open a log in `store`; all ranks open logs in the same order. `timeout`: the mesh's (seconds)."""
        self.rank = rank
        self._budget = min(_MOST_SECONDS, _SHARE_OF_TIMEOUT * timeout)
        self._deadline: float | None = None
        self._store_answers = True
        self._store = store
        self.prefix = f"plait/{store.add(f'plait/{rank}', 1)}"
        """The beginning of its keys in the store: another for each mesh, the same on all ranks."""
        self._own: FailureRecord | None = None
        self.activity = activity_file_of_rank()
        """Where this rank writes what it waits for; None without a supervisor."""

    def record(self, awaited: str, suspects: tuple[int, ...]) -> None:
        """Write that this rank failed while it waited for `suspects`; later calls have no effect."""
        if self._own is None:
            self._own = FailureRecord(awaited, suspects)
            self._write(self._own)

    def seconds_left(self) -> float:
        """Return the seconds left for all further waits for the store; the first call sets the deadline."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._budget
        return max(0.0, self._deadline - time.monotonic())

    def search(self, suspects: tuple[int, ...], patience: float) -> FailureTrace:
        """Read the failure records of `suspects` and, transitively, of ranks they waited for; may block.

        Then writes into this rank's own record which ranks the search ended at. `patience`: seconds to wait
        for missing records. Returns early where every suspected rank has a record, or where the search of
        another rank ended at one of the silent ranks: then that result counts. Waits longer while several are
        silent, never beyond the deadline.
        """
        trace = FailureTrace({}, suspects)
        longest = 0.8 * self.seconds_left()  # the rest is for writing this rank's own result
        if self._store_answers:
            found = self._within(self.seconds_left(), lambda: self._search(suspects, patience, longest))
            trace = found or trace
        if self._own is not None and self._own.culprits is None:
            self._own = FailureRecord(self._own.awaited, self._own.suspects, trace.silent)
            self._write(self._own)
        return trace

    def _search(self, suspects: tuple[int, ...], patience: float, longest: float) -> FailureTrace:
        begun = time.monotonic()
        while True:
            trace = self._follow(suspects)
            culprits = {rank for record in trace.records.values() for rank in record.culprits or ()}
            if culprits & set(trace.silent):
                return FailureTrace(trace.records, tuple(sorted(culprits & set(trace.silent))))
            patient = patience if len(trace.silent) < 2 else max(patience, _PATIENCE_WITH_SEVERAL)
            if not trace.silent or time.monotonic() - begun > min(patient, longest):
                return trace
            time.sleep(_POLL_PERIOD)

    def _follow(self, suspects: tuple[int, ...]) -> FailureTrace:
        """Read, without waiting, the records of `suspects` and, transitively, of ranks they waited for."""
        records: dict[int, FailureRecord] = {}
        silent: list[int] = []
        waiting = list(suspects)
        while waiting:
            rank = waiting.pop(0)
            if rank == self.rank or rank in records or rank in silent:
                continue
            record = self._read(rank)
            if record is None:
                silent.append(rank)
            else:
                records[rank] = record
                waiting += record.suspects if record.culprits is None else record.culprits
        return FailureTrace(records, tuple(sorted(silent)))

    def _read(self, rank: int) -> FailureRecord | None:
        key = f"{self.prefix}/{rank}"
        if not self._store.check([key]):
            return None
        awaited, suspects, culprits = json.loads(self._store.get(key))
        return FailureRecord(awaited, tuple(suspects), None if culprits is None else tuple(culprits))

    def _write(self, record: FailureRecord) -> None:
        text = json.dumps([record.awaited, record.suspects, record.culprits])
        if self._store_answers:
            key = f"{self.prefix}/{self.rank}"
            self._within(self.seconds_left(), lambda: self._store.set(key, text))

    def _within(self, seconds: float, function: Callable[[], T]) -> T | None:
        """Return the result of `function`; None, and the store is not used again, if it fails or is late."""
        answer = within(seconds, lambda: None if is_gone(self._store) else (function(),))
        self._store_answers = answer is not None
        return None if answer is None else answer[0]


def failure_log_of_world(rank: int, timeout: float) -> FailureLog | None:
    """Return a new `FailureLog` in the store of torch's default process group; None where it has no store."""
    try:
        return FailureLog(dist.distributed_c10d._get_default_store(), rank, timeout)
    except (RuntimeError, ValueError):
        return None


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
