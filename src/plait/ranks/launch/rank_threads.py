"""Ranks as threads of one process: a single debugger, ordered prints, deadlocks detected at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch

from plait.errors import MeshError
from plait.ranks.accelerator import keep_stand_in_for_gpus
from plait.ranks.failure.rank_failure import RankFailure, from_exception, root_cause
from plait.ranks.transport.threads.cooperative_scheduler import CooperativeScheduler
from plait.ranks.transport.threads.operations import GroupOperations
from plait.ranks.transport.threads.transport import (
    Key,
    MakeTransport,
    RankThread,
    ThreadTransport,
    ThreadTransports,
    current_thread_rank,
)

Result = TypeVar("Result")

_POLL_PERIOD = 0.002
"""Seconds between two looks at whether a thread has ended."""


def run_threads(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    ranks: int,
    threads: int,
    shared_results: dict[Hashable, Any] | None = None,
    make_transport: MakeTransport = ThreadTransport,
) -> list[Result]:
    """Call `function(*arguments)` on `ranks` threads, running one at a time; return results, rank 0 first.

    All ranks get the same argument objects, and share the state of the process: modules, the environment,
    torch's default dtype. torch's and Python's random generators are each rank's own, seeded with the rank.
    `threads`: torch's threads per rank. `shared_results`: shared by their meshes, see `GridMesh`; empty by
    default. `make_transport`: of each group. Raises the first rank's error, as `RankPool.run` does.
    """
    if ranks < 1:
        raise MeshError(f"{ranks} ranks were asked for: give at least 1.")
    keep_stand_in_for_gpus()
    scheduler, groups = CooperativeScheduler(ranks), dict[Key, GroupOperations]()
    shared_results = {} if shared_results is None else shared_results
    results: dict[int, Result] = {}
    failures: dict[int, tuple[RankFailure, BaseException]] = {}

    def run(rank: int) -> None:
        scheduler.begin(rank)
        try:
            torch.set_num_threads(threads)  # MKL asks OpenMP, which has a number for each thread
            torch.manual_seed(rank)
            random.seed(rank)
            results[rank] = function(*arguments)
        except BaseException as error:
            failures[rank] = from_exception(rank, error), error
        finally:
            scheduler.end(rank)

    before = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
    torch.set_num_threads(threads)
    try:
        for rank in range(ranks):
            local = ThreadTransports(rank, scheduler, groups, shared_results, make_transport)
            RankThread(local, partial(run, rank)).start()
        scheduler.run()
    except BaseException:  # Ctrl-C: ranks that wait end, the one that runs ends at its next wait
        scheduler.cancel("the run was interrupted")
        raise
    finally:
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])
        random.setstate(before[2])
    if failures:
        cause = root_cause(failure for failure, _ in failures.values())
        error = failures[cause.rank][1]
        raise cause.exception() from error
    return [results[rank] for rank in range(ranks)]


def sleep(seconds: float) -> None:
    """Sleep for `seconds`; where ranks are threads, the other ranks run meanwhile."""
    rank = current_thread_rank()
    if rank is None:
        time.sleep(seconds)
    else:
        rank.pause(seconds)


def join_thread(thread: threading.Thread) -> None:
    """Block until `thread` ends; where ranks are threads, the other ranks run meanwhile."""
    if current_thread_rank() is not None:
        while thread.is_alive():
            sleep(_POLL_PERIOD)
    thread.join()
