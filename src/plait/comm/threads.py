"""Ranks as threads of this process: one debugger, prints in order of ranks, deadlocks known at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch

from plait.comm.failure import Failure, from_exception, root_cause
from plait.comm.transport.local import LocalRank, RankThread, Turns
from plait.comm.transport.local.calls import Board
from plait.comm.transport.local.transport import Key
from plait.errors import MeshError

Result = TypeVar("Result")


def run_threads(
    function: Callable[..., Result], arguments: tuple[Any, ...], ranks: int, threads: int
) -> list[Result]:
    """Call `function(*arguments)` on `ranks` threads that take turns, and return their results, rank 0 first.

    All ranks get the very same arguments, and share what the process has: modules, the environment, torch's
    default dtype. torch's and Python's random generators are each rank's own, seeded with the rank. `threads`
    are torch's, in each rank. Raises the first rank's error, as `RankPool.run` does.
    """
    if ranks < 1:
        raise MeshError(f"{ranks} ranks were asked for: give at least 1.")
    turns, boards, shared = Turns(ranks), dict[Key, Board](), dict[Hashable, Any]()
    results: dict[int, Result] = {}
    failures: dict[int, tuple[Failure, BaseException]] = {}

    def run(rank: int) -> None:
        turns.begin(rank)
        try:
            torch.manual_seed(rank)
            random.seed(rank)
            results[rank] = function(*arguments)
        except BaseException as error:
            failures[rank] = from_exception(rank, error), error
        finally:
            turns.end(rank)

    before = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
    torch.set_num_threads(threads)
    try:
        for rank in range(ranks):
            RankThread(LocalRank(rank, turns, boards, shared), partial(run, rank)).start()
        turns.start()
        turns.join()
    except BaseException:  # Ctrl-C: ranks that wait end, the one that runs ends at its next wait
        turns.cancel("the run was interrupted")
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
