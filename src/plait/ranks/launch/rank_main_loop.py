"""The main loop of a rank process: receive a job, run it in a new process group, send the result, pickled."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import torch
from torch.distributed.distributed_c10d import Store

from plait.errors import PlaitError
from plait.ranks.accelerator import finish_queued_work, has_used_accelerator
from plait.ranks.exchange_with_supervisor import WorldChange
from plait.ranks.failure.process_watch import end_orphan, end_process
from plait.ranks.failure.rank_failure import RankFailure, from_exception
from plait.ranks.gpu_sharing import explained_sharing
from plait.ranks.launch.rank_job import RankJob, dumps_result, loads_call, stack_file
from plait.ranks.launch.shut_rank_connections import RankConnections
from plait.ranks.launch.world_membership import join_world, leave_world
from plait.ranks.run_kept_in_memory import drop_kept_run, forget_connections_of_kept_run

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stack to its stack file, even while it is blocked in C++."""
STOP_SIGNAL = signal.SIGUSR1
"""Requests a graceful stop; blocked until the function installs a handler."""
END = None
"""Sent by the parent, in place of a job, to end a rank process."""
STOP = "stop"
"""Sent by a supervisor to end the job that runs: waits for other ranks raise errors from then on."""
READY = "ready"
"""Sent by a rank that has failed, once it has left its world and can take another job."""
LEAVES_BY_ENDING = "leaves by ending"
"""Sent by a rank that has failed, and cannot leave its world but by the end of its process."""
PING = "ping"
"""Sent by a supervisor to a new process, which sends it back once it can take a job."""
BECOMES_SPARE = "becomes a spare"
"""Sent by a supervisor to a process that is not in the next world: it frees what it keeps of the run."""
_SECONDS_TO_LEAVE = 2.0
_SECONDS_WITH_STORE = 1.0
_STOP_PERIOD = 0.01
"""Seconds between two times that connections are shut: the job may open others."""


_Jobs = queue.SimpleQueue[RankJob | str]
"""What the parent has sent for the thread that runs jobs: these, and `BECOMES_SPARE`."""


def serve(connection: Connection) -> None:
    """Run jobs received from `connection` and send back their results, until the parent ends this process."""
    gc.freeze()  # no collection visits what the fork server imported, nor copies its pages to this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    signal.signal(signal.SIGTERM, lambda *_: None)  # as above; data loaders would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_SIGNAL])
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # To the pool a rank is a daemon, ended with its parent; but it may start processes (data loaders).
    multiprocessing.current_process().daemon = False
    jobs: _Jobs = queue.SimpleQueue()
    busy = threading.Event()
    arguments = (connection, jobs, busy)
    threading.Thread(target=_listen, args=arguments, name="plait-parent", daemon=True).start()
    while True:
        job = _next_job(jobs)
        report = _run(job)
        _flush_output()
        data = pickle.dumps(report)
        has_to_leave = job.goes_on and isinstance(report, RankFailure)
        if not has_to_leave:
            busy.clear()  # before the parent receives it, and may end
        with suppress(OSError):  # the parent is gone: `_listen` ends this process
            connection.send_bytes(data)
            if has_to_leave:
                _leave_failed_world(connection)
                busy.clear()
                connection.send_bytes(pickle.dumps(READY))


def _next_job(jobs: _Jobs) -> RankJob:
    """Wait for the parent's next job, and return it; on `BECOMES_SPARE` meanwhile, free the kept run."""
    while isinstance(job := jobs.get(), str):
        drop_kept_run()
        gc.collect()
    return job


def _flush_output() -> None:
    """Flush stdout and stderr, as far as possible: what reads them may be gone, or they may be closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _leave_failed_world(connection: Connection) -> None:
    """Leave the process group and free memory after a failed job; end this process if that takes too long.

    A GPU may still wait for a lost rank: then too. The supervisor may start another process in its place.
    """
    has_gpu = has_used_accelerator()
    is_kept = not has_gpu and forget_connections_of_kept_run()
    if has_gpu or not leave_world(_SECONDS_TO_LEAVE):
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(LEAVES_BY_ENDING))
        end_process(1)
    if not is_kept:  # what takes it, or drops it, collects
        gc.collect()


def _listen(connection: Connection, jobs: _Jobs, busy: threading.Event) -> None:
    """Receive jobs; on `STOP` end the one that runs; on `END`, or when the parent is gone, this process.

    Sends a `PING` back.

    The connection is closed when the parent is gone, since only it holds the other end.
    """
    job: RankJob | None = None
    try:
        while True:
            message: RankJob | str | None = pickle.loads(connection.recv_bytes())
            if message is END:
                end_process(0)
            if message == PING:
                connection.send_bytes(pickle.dumps(PING))
                continue
            if message == BECOMES_SPARE:
                jobs.put(message)  # the thread that runs jobs keeps the run
                continue
            if isinstance(message, str):
                _shut_until_ready(connection, busy, job)
                continue
            job = message
            busy.set()
            jobs.put(job)
    except (EOFError, OSError):
        if job is not None and busy.is_set():
            shutil.rmtree(job.run_folder or job.folder, ignore_errors=True)
            end_orphan(f"rank {job.world.rank}: the process that started it is gone")
        end_process(1)


def _shut_until_ready(connection: Connection, busy: threading.Event, job: RankJob | None) -> None:
    """Shut the connections to other ranks, again and again, until the job has ended or a message comes.

    At first not those to the store, where ranks look up which one failed first.
    """
    if job is None:
        return
    began, connections = time.monotonic(), RankConnections(job.world.port, job.other_hosts)
    while busy.is_set() and not connection.poll(_STOP_PERIOD):
        connections.shut(with_store=time.monotonic() - began >= _SECONDS_WITH_STORE)


def _run(job: RankJob) -> bytes | RankFailure:
    """Return the pickled result of the function that the rank called, or how the rank failed."""
    rank = job.world.rank
    with stack_file(job.folder, rank).open("w") as stack:
        faulthandler.enable(stack, all_threads=False)
        faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
        try:
            return _call(job)
        except BaseException as error:
            return from_exception(rank, error)
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()


def _call(job: RankJob) -> bytes | RankFailure:
    _restore_parent_state(job)
    store = join_world(job.world, job.timeout, job.device, job.ranks_per_gpu)
    _mark(job, "joined", store)
    try:
        function, arguments = loads_call(job.call)
        with explained_sharing():
            result = function(*arguments)
    except WorldChange as change:
        _wait_to_leave(job, store)
        return RankFailure(job.world.rank, str(change), is_world_change=True)
    except BaseException as error:
        return from_exception(job.world.rank, error)
    try:
        payload = dumps_result(result, job.world.rank)
    except PlaitError as error:
        return replace(from_exception(job.world.rank, error), is_final=True)
    _wait_to_leave(job, store)
    if not (finish_queued_work(job.timeout) and leave_world()):
        raise PlaitError(
            f"rank {job.world.rank} returned while operations of its own were still pending: wait for every "
            "asynchronous operation before the function returns."
        )
    return payload


def _wait_to_leave(job: RankJob, store: Store) -> None:
    """Wait until all ranks have joined the world, and a second at most until all have finished.

    Leaving closes connections: not while a peer still opens them, and not while it may still read. A peer
    that runs for longer either does not need this rank, or gets an error when this rank leaves.
    """
    _mark(job, "finished", store)
    _wait_for_all(job, "joined", job.timeout, store)
    _wait_for_all(job, "finished", 1.0, store)


def _mark(job: RankJob, event: str, store: Store) -> None:
    """Record an event of this rank for the others: in a file, over several hosts in the store."""
    if job.world.local_size == job.world.world_size:
        Path(job.folder, f"{event}-{job.world.rank}").touch()
    else:
        store.add(f"plait/{event}", 1)


def _wait_for_all(job: RankJob, event: str, patience: float, store: Store) -> None:
    """Block until all ranks have recorded an event, at most `patience` seconds."""
    deadline, size = time.monotonic() + patience, job.world.world_size
    if job.world.local_size < size:
        while store.add(f"plait/{event}", 0) < size and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    for rank in range(size):
        while not Path(job.folder, f"{event}-{rank}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)


def _restore_parent_state(job: RankJob) -> None:
    """Set the environment, directory and module path to the parent's; seed the random generators by rank."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.chdir(job.directory)
    sys.path[:] = job.path
    vars(sys.modules["__main__"])["__file__"] = job.main_file
    multiprocessing.set_start_method(job.start_method, force=True)
    torch.set_num_threads(job.threads)
    torch.set_default_dtype(torch.float32)
    random.seed(job.world.rank)
    numpy.random.seed(job.world.rank)
    torch.manual_seed(job.world.rank)
