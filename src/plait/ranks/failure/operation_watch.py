"""The operation watch: ends a rank on a GPU when an operation does not finish within the timeout.

On NCCL `wait` only orders streams: a peer that does not take part blocks the GPU, and the host at its next
synchronisation, without an error. So a thread watches the operations that were waited for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from plait.errors import CommunicationError
from plait.ranks.accelerator import StreamEvent
from plait.ranks.failure.process_watch import end_process

_MOST_PERIOD = 0.5
"""Seconds between two checks, at most."""
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's functions that return the flight record, pickled: with NCCL, and without it since 2.12."""
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class WatchedOperation(Protocol):
    """Interface of an operation that `OperationWatch` watches: it records its failure and makes its error."""

    def record_failure(self, cause: Exception) -> None:
        """Write to the log of failures that this rank failed in this operation."""

    def error_of(self, cause: Exception) -> CommunicationError:
        """Return the error that names the operation, its peers and the rank that failed first."""


class OperationWatch:
    """Ends this process when its GPU's operations make no progress for `timeout` seconds; checks in a thread.

    Before it ends the process with exit code 1, the thread writes this rank's failure record, for the other
    ranks' errors, torch's flight recorder to a file, and to stderr the error and the stack of each thread.
    Operations finish in the order of their waits; the timeout counts from the last one that finished, since
    the host runs ahead of its GPU.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        completion: Callable[[], StreamEvent],
        end: Callable[[int], object] = end_process,
    ) -> None:
        """`completion()` records and returns an event on the current stream; `end(code)` ends the process."""
        self._rank, self._timeout = rank, timeout
        self._completion, self._end = completion, end
        self._period = min(_MOST_PERIOD, timeout / 4)
        self._unfinished: deque[tuple[StreamEvent, WatchedOperation]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, operation: WatchedOperation) -> None:
        """Watch an operation that the current stream has just been told to wait for. Does not block."""
        self._unfinished.append((self._completion(), operation))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="plait-operation-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching all operations, including those added before."""
        self._closed.set()

    def _watch(self) -> None:
        oldest: WatchedOperation | None = None
        since = time.monotonic()
        while not self._closed.wait(self._period):
            while self._unfinished and self._unfinished[0][0].is_done():
                self._unfinished.popleft()
            first = self._unfinished[0][1] if self._unfinished else None
            if first is not oldest:
                oldest, since = first, time.monotonic()
            elif first is not None and time.monotonic() - since > self._timeout:
                self._fail(first)
                return

    def _fail(self, operation: WatchedOperation) -> None:
        cause = TimeoutError("timed out")
        operation.record_failure(cause)
        error = operation.error_of(cause)
        with suppress(OSError, ValueError):  # stderr may be closed
            print(f"plait: {error}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
        with suppress(OSError, RuntimeError):
            path = write_flight_record(self._rank)
            print(f"plait: torch's flight record is in {path}.", file=sys.stderr, flush=True)
        self._end(1)


def write_flight_record(rank: int) -> Path | None:
    """Write torch's flight recorder (its last operations) to this rank's file; return the path, or None.

    The file is that of torch: `TORCH_FR_DUMP_TEMP_FILE`, or its older name, followed by the rank; by default
    `nccl_trace_rank_` in the folder for temporary files. Returns None where this torch records nothing.
    """
    record = next(
        filter(None, (getattr(torch._C._distributed_c10d, name, None) for name in _RECORDERS)), None
    )
    if record is None:
        return None
    names = (os.environ.get(name) for name in _PREFIXES)
    prefix = next(filter(None, names), os.path.join(tempfile.gettempdir(), "nccl_trace_rank_"))
    path = Path(f"{prefix}{rank}")
    path.unlink(missing_ok=True)  # not what a link there points to, in a folder that others write to
    with path.open("xb") as file:
        file.write(record())
    return path
