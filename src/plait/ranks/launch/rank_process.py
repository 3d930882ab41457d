"""The main loop of a rank process: receive a job, run it in a new process group, send the result, pickled."""

from __future__ import annotations

import faulthandler
import gc
import io
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import torch
from torch import Tensor

from plait.errors import ModelError, PlaitError
from plait.ranks.device import finish_queued_work
from plait.ranks.failure.failure_log import RankFailure, from_exception
from plait.ranks.failure.process_watch import end_orphan, end_process
from plait.ranks.gradient_hook_detection import first_gradient_hook
from plait.ranks.launch.world_membership import join_world, leave_world
from plait.ranks.rank_device import explained_sharing
from plait.ranks.world import World

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which also records the objects of the main module that it pickles by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Called by `pickle` for each object: note objects of the main module, pickled by value.

        Raises ModelError for a tensor with hooks on its gradient, which the pickled one would not have.
        """
        hook = first_gradient_hook({"": thing}) if isinstance(thing, Tensor) else None
        if hook is not None:
            raise ModelError(
                f"a tensor {list(thing.shape)} has a hook of {hook[1]}, which would not reach the ranks' "
                "processes: register it in the function that the ranks run."
            )
        if _is_in_main(thing):
            outermost = thing.__qualname__.partition(".")[0]
            self.of_main[outermost] = getattr(sys.modules["__main__"], outermost)
            self.of_main.setdefault(thing.__name__, thing)  # cloudpickle forgets where a class was nested
        return super().reducer_override(thing)


def dumps_call(call: FunctionCall) -> bytes:
    """Return a pickled call; classes and functions of the main module are included by value.

    Raises the errors of `cloudpickle` for objects that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(call)
    pickler.dump(dict(pickler.of_main))  # the same objects, since a pickler keeps a memo
    return file.getvalue()


def loads_call(data: bytes) -> FunctionCall:
    """Return the call in `data`, and define in this main module the classes and functions that it needs.

    `pickle` looks them up there by name: when a worker of a `DataLoader` sends a batch of a class of the main
    module, or when `torch.save` writes a model.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    call: FunctionCall = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    return call


def dumps_result(result: object, rank: int) -> bytes:
    """Return a rank's result as bytes. Raises `PlaitError` where it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise PlaitError(
            f"rank {rank}'s result, of type {type(result).__name__}, cannot be sent to other processes "
            f"({error}): return numbers, text, tensors and containers of them."
        ) from error
    return data


def _is_in_main(thing: Any) -> bool:
    """Return whether `thing` is a class or function that `pickle` finds by name in the main module."""
    if getattr(thing, "__module__", None) != "__main__" or not hasattr(thing, "__qualname__"):
        return False
    try:
        return attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stack to its stack file, even while it is blocked in C++."""
STOP_SIGNAL = signal.SIGUSR1
"""Requests a graceful stop; blocked until the function installs a handler."""
END = None
"""Sent by a pool, in place of a job, to end a rank process."""


@dataclass(frozen=True)
class RankJob:
    """A function call for one rank, with the settings of the parent process that it may depend on."""

    call: bytes  # the function and its arguments, pickled
    world: World
    folder: str  # of this run only: for the rendezvous and the stack files
    environment: dict[str, str]
    directory: str
    path: list[str]
    main_file: str | None  # of the main module, which processes started by the rank import
    start_method: str  # of multiprocessing in the rank
    threads: int
    timeout: float
    device: str
    ranks_per_gpu: int = 1


def stack_file(folder: str, rank: int) -> Path:
    """Return the file to which a rank writes its stack on `STACK_SIGNAL` or when it crashes."""
    return Path(folder, f"stack-{rank}")


def serve(connection: Connection) -> None:
    """Run jobs from `connection`, one after another, until the pool closes it."""
    gc.freeze()  # no collection visits what the fork server imported, nor copies its pages to this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    signal.signal(signal.SIGTERM, lambda *_: None)  # as above; data loaders would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_SIGNAL])
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # To the pool a rank is a daemon, ended with its parent; but it may start processes (data loaders).
    multiprocessing.current_process().daemon = False
    jobs: queue.SimpleQueue[RankJob] = queue.SimpleQueue()
    busy = threading.Event()
    arguments = (connection, jobs, busy)
    threading.Thread(target=_listen, args=arguments, name="plait-parent", daemon=True).start()
    while True:
        report = _run(jobs.get())
        sys.stdout.flush()
        sys.stderr.flush()
        data = pickle.dumps(report)
        busy.clear()  # before the parent receives it, and may end
        with suppress(OSError):  # the parent is gone: `_listen` ends this process
            connection.send_bytes(data)


def _listen(connection: Connection, jobs: queue.SimpleQueue[RankJob], busy: threading.Event) -> None:
    """Receive jobs; on `END`, or when the parent is gone, end this process, even while a job runs.

    The connection is closed when the parent is gone, since only it holds the other end.
    """
    job: RankJob | None = None
    try:
        while True:
            message: RankJob | None = pickle.loads(connection.recv_bytes())
            if message is END:
                end_process(0)
            job = message
            busy.set()
            jobs.put(job)
    except (EOFError, OSError):
        if job is not None and busy.is_set():
            shutil.rmtree(job.folder, ignore_errors=True)
            end_orphan(f"rank {job.world.rank}: the process that started it is gone")
        end_process(1)


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
    join_world(job.world, job.timeout, job.device, job.ranks_per_gpu)
    _mark(job, "joined")
    try:
        function, arguments = loads_call(job.call)
        with explained_sharing():
            result = function(*arguments)
    except BaseException as error:
        return from_exception(job.world.rank, error)
    payload = dumps_result(result, job.world.rank)
    # Leaving closes connections: not while a peer still opens them, and not while it may still read.
    # A peer that runs for longer either does not need this rank, or gets an error when this rank leaves.
    _mark(job, "finished")
    _wait_for_all(job, "joined", job.timeout)
    _wait_for_all(job, "finished", 1.0)
    if not (finish_queued_work(job.timeout) and leave_world()):
        raise PlaitError(
            f"rank {job.world.rank} returned while operations of its own were still pending: wait for every "
            "asynchronous operation before the function returns."
        )
    return payload


def _mark(job: RankJob, event: str) -> None:
    Path(job.folder, f"{event}-{job.world.rank}").touch()


def _wait_for_all(job: RankJob, event: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    for rank in range(job.world.world_size):
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
