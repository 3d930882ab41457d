"""Runs a function in every rank: in local ranks of our own, or as one rank of a launcher's world."""

from __future__ import annotations

import atexit
import math
import pickle
import signal
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from plait.comm.orphan_watch import OrphanWatch
from plait.comm.pool import RankPool
from plait.comm.rank_threads import run_threads
from plait.comm.signal_handling import Watchdog
from plait.comm.transport.world_ranks import current_ranks
from plait.comm.world import World, find_world, join_world, leave_world
from plait.errors import MeshError, PlaitError

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    *arguments: Any,
    ranks: int | None = None,
    threads: int | None = None,
    timeout: float = 600.0,
    device: str = "auto",
    ranks_as: Literal["processes", "threads"] = "processes",
) -> list[Result]:
    """Calls `function(*arguments)` in every rank, within a default process group, and returns all results.

    Alone, this starts `ranks` processes on this host (a `RankPool` with one run). Under torchrun, mpirun or
    srun this process *is* a rank: it joins the others, calls the function here and leaves the group again;
    all ranks must call `launch` alike. Each rank then returns the same list, so keep results small (one
    all-gather over the world). The run as a whole may take as long as it likes. A rank whose launcher, or
    local parent, is gone ends within a second, and says so on stderr.

    What the function needs of a script's or notebook's classes goes with it: so workers of a `DataLoader`,
    which local ranks start by fork on Linux unless `multiprocessing.set_start_method` says otherwise, may use
    them too.

    Args:
        function: what every rank calls.
        arguments: what it is called with.
        ranks: how many; alone the number of GPUs, or 1 without any; under a launcher the world's size.
        threads: of torch, in each rank; alone this process's, shared out; under a launcher as it is.
        timeout: seconds that a rank waits for its peers in the default group; a `Mesh` has its own.
        device: `cpu`, `cuda`, or `auto`: CUDA where every rank on a host has a GPU of its own.
        ranks_as: `processes`, or `threads` of this process that take turns, for debugging: one debugger,
            prints in order of ranks, a deadlock reported at once; on the CPU, and not under a launcher.

    Returns:
        The results, rank 0 first.

    Raises:
        MeshError: `ranks` is not the size of the world, the world is half set, or this is inside a rank.
        RankError: a local rank failed or died; names it and shows its traceback.
        PlaitError: the one that a rank raised, as it was.
    """
    world = find_world()
    _require_possible(world, ranks, ranks_as, device)
    if world is not None:
        return _run_joined(world, function, arguments, threads, timeout, device)
    if ranks is None:
        ranks = max(1, torch.cuda.device_count()) if device != "cpu" and ranks_as == "processes" else 1
    if threads is None:
        threads = max(1, torch.get_num_threads() // max(1, ranks))
    if ranks_as == "threads":
        return run_threads(function, arguments, ranks, threads)
    with RankPool(ranks, threads=threads, timeout=timeout, device=device) as pool:
        return pool.run(function, *arguments, timeout=math.inf)


def _require_possible(world: World | None, ranks: int | None, ranks_as: str, device: str) -> None:
    """MeshError for ranks within a rank, another number than a launcher started, or threads elsewhere."""
    inside = current_ranks()
    if inside is not None:
        raise MeshError(
            f"launch was called inside rank {inside.rank} of {inside.size}: call the function itself."
        )
    if ranks_as not in ("processes", "threads"):
        raise MeshError(f"ranks_as is {ranks_as!r}: choose processes or threads.")
    if ranks_as == "threads" and device == "cuda":
        raise MeshError("ranks as threads run on the CPU: choose device cpu, or ranks as processes.")
    if world is None:
        return
    if ranks_as == "threads":
        raise MeshError(
            f"{world.launcher} started {world.world_size} processes: start the program without it to have "
            "threads as ranks."
        )
    if ranks not in (None, world.world_size):
        raise MeshError(
            f"launch was asked for {ranks} ranks and {world.launcher} started {world.world_size}: "
            "give both the same number, or leave ranks out."
        )


def _run_joined(
    world: World,
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    threads: int | None,
    timeout: float,
    device: str,
) -> list[Result]:
    if threads is not None:
        torch.set_num_threads(threads)
    with Watchdog(f"rank {world.rank}"), OrphanWatch(world):
        try:
            join_world(world, timeout, device)
            results = _gathered(world, function(*arguments))
        except BaseException:
            _abandon(patience=min(2.0, 0.05 * timeout))
            raise
        leave_world()
        return results


def _abandon(patience: float) -> None:
    """Leave the world after a failure, which tells the peers, and see to it that this process can end.

    An operation that waits for a lost peer never ends, nor does the end of the process, which waits for it:
    each of the two is given `patience` seconds.
    """
    if not leave_world(patience):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, patience)


def _gathered(world: World, result: Result) -> list[Result]:
    """Every rank's result on every rank. Communication: one all-gather of pickled results over the world."""
    try:
        mine: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise PlaitError(
            f"rank {world.rank}'s result, of type {type(result).__name__}, cannot be sent to the others "
            f"({error}): return numbers, text, tensors and containers of them."
        ) from error
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, mine)
    return [result if rank == world.rank else pickle.loads(data) for rank, data in enumerate(everyone)]
