"""`launch`: call a function in every rank, in local ranks or in those of torchrun, mpirun or srun."""

from __future__ import annotations

import atexit
import math
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from plait.errors import MeshError
from plait.plan.argument_checks import require_choice, require_flag, require_number, whole
from plait.ranks.accelerator import CPU, default_device, finish_queued_work, visible_accelerators
from plait.ranks.exchange_with_supervisor import supervisor_of_rank
from plait.ranks.failure.process_watch import OrphanWatch, Watchdog
from plait.ranks.gpu_sharing import explained_sharing
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.run_elastic import run_elastic, run_elastic_host
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.launch.rank_threads import run_threads
from plait.ranks.launch.result_all_gather import all_gather_results
from plait.ranks.launch.world_membership import join_world, leave_world
from plait.ranks.launcher_environment import World, find_world
from plait.ranks.transport.interface import RankTransports
from plait.ranks.transport.process_ranks import current_ranks, joined_processes

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    *arguments: Any,
    ranks: int | None = None,
    threads: int | None = None,
    timeout: float = 600.0,
    device: str = "auto",
    ranks_as: Literal["processes", "threads"] = "processes",
    ranks_per_gpu: int = 1,
    elastic: bool | Elastic = False,
) -> list[Result]:
    """Call `function(*arguments)` in every rank, within a default process group, and return all results.

    Without a launcher, this starts `ranks` processes on this host (a `RankPool` with one run). Under
    torchrun, mpirun or srun this process *is* a rank, and calls the function here; all must call `launch`
    with the same arguments. Inside a rank of a world that is there already, such as Ray's, the function is
    called in that world. Each rank then returns the same list, so keep results small (one all-gather over the
    world); tensors of other ranks are on the CPU. The run has no time limit. A rank whose launcher, or local
    parent, is gone ends within a second. Classes and functions of a script are pickled with the function.

    Args:
        function: called by every rank, with the `arguments`.
        ranks: by default as many as the GPUs take, or 1 without any; under a launcher the world's size.
        threads: of torch, in each rank; by default this process's, divided; under a launcher unchanged.
        timeout: seconds that a rank waits for its peers, also in a `Mesh` that is given none of its own.
        device: `cpu`, `cuda`, or `auto`: CUDA where every rank on a host has a GPU of its own.
        ranks_as: `processes`, or `threads` of this process that run one at a time, for debugging: one
            debugger, prints in order of ranks, deadlocks reported at once; on the CPU, without a launcher.
        ranks_per_gpu: the most ranks that share a GPU, to try a plan without as many; they are spread evenly,
            neighbours on the same, and take turns: times mean nothing. Needs NCCL 2.30 or later.
        elastic: whether processes outlive a lost rank: `function` is called again in all, and a new one, and
            goes on from `plait.Snapshots`. An `Elastic` sets spares. A launcher starts one process a host.

    Returns:
        The results, rank 0 first.

    Raises:
        MeshError: `ranks` is not the world's size, the environment is incomplete, or ranks cannot share GPUs.
        RankError: a local rank failed or died; names it and shows its traceback.
        PlaitError: raised by a rank; also where a result cannot be sent to the other ranks.
    """
    ranks = None if ranks is None else whole("ranks", ranks, MeshError)
    threads = None if threads is None else whole("threads", threads, MeshError)
    ranks_per_gpu = whole("ranks_per_gpu", ranks_per_gpu, MeshError)
    _require_arguments(function, timeout, device, ranks_as, ranks_per_gpu, elastic)
    call, settings = partial(function, *arguments), _elastic_settings(elastic)
    if (inside := current_ranks()) is not None:
        _require_world_inside(inside, ranks, device, settings)
        return _results(inside, call, threads, timeout)
    options: dict[str, Any] = {"timeout": timeout, "device": device, "ranks_per_gpu": ranks_per_gpu}
    if (world := find_world()) is not None and settings is not None:
        return _run_host(function, arguments, settings, world, ranks, threads, options)
    if world is not None:
        _require_agreement(world, ranks, ranks_as)
        return _run_joined(world, call, threads, **options)
    ranks = ranks or _default_ranks(device if ranks_as == "processes" else "cpu", ranks_per_gpu)
    threads = threads or max(1, torch.get_num_threads() // ranks)
    if ranks_as == "threads":
        return run_threads(function, arguments, ranks, threads)
    return _run_processes(function, arguments, settings, ranks, options | {"threads": threads})


def _run_processes(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    elastic: Elastic | None,
    ranks: int,
    options: Mapping[str, Any],
) -> list[Result]:
    """Run a function in processes of this host, elastic or in a pool, and return the results of all ranks."""
    if elastic is not None:
        return run_elastic(function, arguments, elastic, ranks=ranks, **options)
    with RankPool(ranks, **options) as pool:
        return pool.run(function, *arguments, timeout=math.inf)


def _run_host(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    elastic: Elastic,
    world: World,
    ranks: int | None,
    threads: int | None,
    options: Mapping[str, Any],
) -> list[Result]:
    """Run a function in elastic ranks of several hosts, as the supervisor of this one; return all results."""
    here = _default_ranks(options["device"], options["ranks_per_gpu"])
    ranks = ranks or here * world.world_size
    threads = threads or max(1, torch.get_num_threads() * world.world_size // ranks)
    return run_elastic_host(function, arguments, elastic, world, ranks=ranks, threads=threads, **options)


def _default_ranks(device: str, ranks_per_gpu: int) -> int:
    """Return as many ranks as the visible GPUs take, or 1 without any."""
    return max(1, 0 if device == "cpu" else visible_accelerators() * ranks_per_gpu)


def _require_arguments(
    function: object, timeout: object, device: object, ranks_as: object, ranks_per_gpu: int, elastic: object
) -> None:
    """Raise MeshError for an argument of `launch` of another type, or out of range."""
    if not callable(function):
        raise MeshError(f"launch was given {function!r}: give a function, and then its arguments.")
    require_number("timeout", timeout, MeshError, positive=True, infinite="no limit")
    require_choice("device", device, ("auto", "cpu", "cuda"), MeshError)
    require_choice("ranks_as", ranks_as, ("processes", "threads"), MeshError)
    if ranks_as == "threads" and device == "cuda":
        raise MeshError("ranks as threads run on the CPU: choose device cpu, or ranks as processes.")
    if ranks_as == "threads" and elastic:
        raise MeshError("elastic ranks are processes: leave elastic out, or ranks_as.")
    if ranks_per_gpu != 1 and (ranks_as == "threads" or device == "cpu"):
        raise MeshError(
            f"ranks_per_gpu is {ranks_per_gpu}, and the ranks were asked to run on the CPU: leave it out."
        )


def _elastic_settings(elastic: object) -> Elastic | None:
    """Return the settings that `elastic` stands for, or None for False. Raises MeshError for another type."""
    if isinstance(elastic, Elastic):
        return elastic
    require_flag("elastic, unless it is an Elastic,", elastic, MeshError)
    return Elastic() if elastic else None


def _require_agreement(world: World, ranks: int | None, ranks_as: str) -> None:
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


def _require_world_inside(
    inside: RankTransports, ranks: int | None, device: str, elastic: Elastic | None
) -> None:
    """Raise MeshError where `launch`, called in a rank of an existing world, asks for another one."""
    if elastic is not None and not supervisor_of_rank():
        raise MeshError(
            f"launch was called for elastic ranks inside rank {inside.rank} of {inside.size}, which another "
            "program has started, and would have to replace: leave elastic out, or call launch in a process "
            "that is no rank."
        )
    if ranks not in (None, inside.size):
        raise MeshError(
            f"launch was called inside rank {inside.rank} of {inside.size}, for {ranks} ranks: give that "
            "number, leave ranks out, or start these ranks elsewhere."
        )
    if device != "auto" and (device == "cuda") != inside.uses_nccl:
        has = "NCCL" if inside.uses_nccl else "no NCCL"
        raise MeshError(
            f"launch was called for device {device} inside rank {inside.rank} of {inside.size}, whose world "
            f"has {has}: leave device out, or make that world for the device."
        )


def _results(
    ranks: RankTransports, call: Callable[[], Result], threads: int | None, timeout: float
) -> list[Result]:
    """Return the results of `call()` on all ranks; `threads`: of torch, if they are to change."""
    if threads is not None:
        torch.set_num_threads(threads)
    result = call()
    everyone = tuple(range(ranks.size))
    transport = ranks.world() or ranks.connect([everyone], "launch", timeout)
    on_cpu = transport is None or transport.carries_cpu_tensors
    device = CPU if on_cpu else default_device()
    return all_gather_results(result, ranks.rank, ranks.size, transport, device)


def _run_joined(
    world: World,
    call: Callable[[], Result],
    threads: int | None,
    timeout: float,
    device: str,
    ranks_per_gpu: int,
) -> list[Result]:
    with Watchdog(f"rank {world.rank}"), OrphanWatch(world), explained_sharing():
        try:
            join_world(world, timeout, device, ranks_per_gpu)
            joined = joined_processes()
            assert joined is not None
            results = _results(joined, call, threads, timeout)
        except BaseException:
            _abandon(patience=min(2.0, 0.05 * timeout))
            raise
        finish_queued_work(timeout)
        leave_world()
        return results


def _abandon(patience: float) -> None:
    """Leave the process groups after a failure, so that the other ranks notice and this process can end.

    An operation that waits for a lost peer never ends, and the exit of the process waits for it: leaving and
    exiting are given `patience` seconds each.
    """
    if not leave_world(patience):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, patience)
