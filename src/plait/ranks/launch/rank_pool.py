"""A pool of rank processes, kept between runs: torch is imported once, further runs start in milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

from plait.errors import MeshError, RankError
from plait.ranks.failure.rank_failure import RankFailure, from_exit, root_cause
from plait.ranks.gpu_sharing import newer_nccl
from plait.ranks.launch.fork_server import start_process
from plait.ranks.launch.rank_job import RankJob, pickled_call, stack_file, unpickled_result
from plait.ranks.launch.rank_main_loop import END, STACK_SIGNAL, serve
from plait.ranks.launch.temporary_run_folder import run_folder
from plait.ranks.launcher_environment import World

Result = TypeVar("Result")

_GRACE = 1.0
"""Seconds for a primary failure to be reported, for a stack to be written, for a process to end."""
_END_TIMEOUT = 0.5
"""Seconds for ranks, and the processes that they have started, to end after `END`."""


@dataclass(frozen=True)
class _RankHandle:
    """A rank process, and the parent's end of the pipe to it."""

    process: ForkServerProcess
    connection: Connection

    def send(self, job: RankJob) -> None:
        with contextlib.suppress(OSError):  # it is gone, which its sentinel shows
            self.connection.send_bytes(pickle.dumps(job))

    def end(self) -> None:
        """Send `END`, which makes the rank process exit; do nothing if the pipe is full or closed."""
        with contextlib.suppress(OSError):
            if select.select([], [self.connection], [], 0)[1]:
                self.connection.send_bytes(pickle.dumps(END))

    def receive(self, rank: int, folder: str) -> bytes | RankFailure:
        """Return the pickled result or the failure that the rank has sent, else one with its exit code."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                report: bytes | RankFailure = pickle.loads(self.connection.recv_bytes())
                return report
        self.process.join(_GRACE)
        return from_exit(rank, self.process.exitcode, _written(folder, rank))


class RankPool:
    """Rank processes on this host, started when first needed, that run one function after another.

    Each run has its own default process group (Gloo; with NCCL for CUDA tensors when GPUs are used) and the
    environment variables, directory and module path of the caller. torch's, Python's and NumPy's random
    generators are seeded with the rank. Functions and results are pickled by cloudpickle, which supports
    closures, lambdas and functions of a notebook; a script needs no `if __name__ == "__main__"`.

    A failure in one rank ends all of them, and the next run starts new ones. Not thread-safe.
    """

    def __init__(
        self,
        ranks: int,
        *,
        threads: int = 1,
        timeout: float = 600.0,
        device: str = "auto",
        ranks_per_gpu: int = 1,
    ) -> None:
        """Make a pool, whose processes start at the first run. Other arguments are those of `launch`.

        `ranks`: default number of ranks of a run. `timeout`: by default also the limit of a whole run.
        """
        self.ranks = ranks
        self.threads = threads
        self.timeout = timeout
        self.device = device
        self.ranks_per_gpu = ranks_per_gpu
        self._children: list[_RankHandle] = []
        self._at_exit = partial(_close_at_exit, weakref.ref(self))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        ranks: int | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """Call `function(*arguments)` in ranks 0 to `ranks - 1` and return their results, rank 0 first.

        Processes are added to the pool as needed. `timeout`: seconds that the run may take; `math.inf` for no
        limit. Raises the `PlaitError` of a rank, and a `RankError` that names a rank which failed, died or
        did not finish, with its traceback.
        """
        count = self.ranks if ranks is None else ranks
        if count < 1:
            raise MeshError(f"{count} ranks were asked for: give at least 1.")
        call = pickled_call(function, arguments)
        with run_folder() as folder:
            try:
                if not self._children:
                    atexit.register(self._at_exit)
                library = newer_nccl() if self.ranks_per_gpu > 1 else None
                for number in range(len(self._children), count):
                    started = start_process(serve, f"plait-{number}", function.__module__, library)
                    self._children.append(_RankHandle(*started))
                children = dict(enumerate(self._children[:count]))
                for rank, child in children.items():
                    child.send(self._job(call, folder, rank, count))
                results = _collect(children, folder, self.timeout if timeout is None else timeout)
                return [unpickled_result(results[rank], rank) for rank in range(count)]
            except BaseException:  # Ctrl-C too
                self.close()
                raise

    def close(self) -> None:
        """End the processes; a later run starts new ones."""
        atexit.unregister(self._at_exit)
        children, self._children = self._children, []
        for child in children:
            child.end()
        deadline = time.monotonic() + _END_TIMEOUT
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            child.process.kill()  # for a stopped process; ranks ignore SIGTERM
        for child in children:
            child.process.join()
            child.process.close()
            child.connection.close()

    def _job(self, call: bytes, folder: str, rank: int, count: int) -> RankJob:
        return RankJob.of_this_process(
            call,
            World(rank, count, rank, count, "plait", f"file://{folder}/store"),
            folder,
            threads=self.threads,
            timeout=self.timeout,
            device=self.device,
            ranks_per_gpu=self.ranks_per_gpu,
        )


def _close_at_exit(reference: weakref.ref[RankPool]) -> None:
    """Close a pool that is still open, before multiprocessing waits for its processes at exit."""
    if (pool := reference()) is not None:
        pool.close()


def _collect(children: Mapping[int, _RankHandle], folder: str, timeout: float) -> dict[int, bytes]:
    """Block until every rank has finished; return the pickled results, or raise the failures' root cause."""
    deadline = time.monotonic() + timeout
    waiting = dict(children)
    results: dict[int, bytes] = {}
    failures: list[RankFailure] = []
    while waiting and all(failure.secondary for failure in failures):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        handles: dict[Any, int] = {child.connection: rank for rank, child in waiting.items()}
        handles |= {child.process.sentinel: rank for rank, child in waiting.items()}
        ready = wait(list(handles), None if math.isinf(remaining) else remaining)
        for rank in {handles[handle] for handle in ready}:
            report = waiting.pop(rank).receive(rank, folder)
            if isinstance(report, bytes):
                results[rank] = report
                continue
            failures.append(report)
            deadline = min(deadline, time.monotonic() + _GRACE)  # the root cause often follows
    if failures:
        cause = root_cause(failures)
        raise cause.exception(_others(waiting, list(results), folder) if cause.secondary else "")
    if waiting:
        late, others = ", ".join(map(str, sorted(waiting))), _others(waiting, list(results), folder)
        raise RankError(f"not finished within {timeout:g} s: rank {late}.\n\n{others}", min(waiting), others)
    return results


def _others(waiting: Mapping[int, _RankHandle], finished: list[int], folder: str) -> str:
    """Return text for an error message: the finished ranks, and the stacks of the `waiting` ranks."""
    for child in waiting.values():
        if child.process.pid is not None and child.process.is_alive():
            os.kill(child.process.pid, STACK_SIGNAL)
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and not all(_written(folder, rank) for rank in waiting):
        time.sleep(0.02)
    time.sleep(0.02)  # a stack is written line by line
    lines = [f"Finished before: rank {', '.join(map(str, sorted(finished)))}."] if finished else []
    for rank in sorted(waiting):
        lines.append(f"rank {rank}: " + (_written(folder, rank) or "no answer: the process is stopped\n"))
    return "\n".join(lines)


def _written(folder: str, rank: int) -> str:
    file = stack_file(folder, rank)
    return file.read_text() if file.exists() else ""
