"""`FailureLog`: records of failures, in the store of the rendezvous, that all ranks can read.

When a rank ends, only the ranks waiting for it notice. They end in turn, others notice that, and so on:
most would blame a rank that only did the same. So a rank that fails first records which ranks it waited for,
in the store of the rendezvous, and then follows the records of others to the ranks that left none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

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
