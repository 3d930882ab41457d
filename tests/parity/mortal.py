"""Ranks that may die: each run forks them from one warm process, and tells how each of them ended.

A `RankPool` ends all ranks as soon as one has died. Here the others go on, as where nobody watches them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch

from plait.ranks.launch.fork_server import _without_main
from plait.ranks.launch.world_membership import join_world
from plait.ranks.launcher_environment import World


class Ending(NamedTuple):
    """What a rank's function gave, or the error that it raised; None if it was killed, or never ended."""

    text: str | None
    seconds: float
    """After the first rank was started."""


class Run(NamedTuple):
    """`function(*arguments)` on some ranks; it gives a string."""

    function: Callable[..., str]
    arguments: tuple[Any, ...]
    ranks: int


class MortalRanks:
    """`run(function, *arguments, ranks=2)`, or several runs at once. Warm once `warm` has been run."""

    def __init__(self, warm: Callable[[], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "plait.ranks.launch.rank_main_loop"])
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, cloudpickle.dumps(warm)), daemon=True)
        with _without_main():
            self._process.start()
        there.close()

    def run(self, function: Callable[..., str], *arguments: Any, ranks: int, limit: float) -> list[Ending]:
        """How each rank ended; those that have not after `limit` seconds are killed."""
        (endings,) = self.run_at_once([Run(function, arguments, ranks)], limit)
        return endings

    def run_at_once(self, runs: list[Run], limit: float) -> list[list[Ending]]:
        """How each rank of each run ended. Runs know nothing of each other."""
        self._pipe.send_bytes(cloudpickle.dumps((runs, limit)))
        assert self._pipe.poll(limit + 30), "the process that ranks are forked from does not answer"
        endings: list[list[Ending]] = pickle.loads(self._pipe.recv_bytes())
        return endings

    def close(self) -> None:
        """End the process that ranks are forked from."""
        self._pipe.close()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, warm: bytes) -> None:
    torch.set_num_threads(1)  # a process that has used several cannot be forked
    pickle.loads(warm)()
    with suppress(EOFError):
        while True:
            runs, limit = pickle.loads(pipe.recv_bytes())
            with tempfile.TemporaryDirectory(prefix="plait-mortal-") as folder:
                pipe.send_bytes(pickle.dumps(_run(Path(folder), runs, limit)))


def _run(folder: Path, runs: list[Run], limit: float) -> list[list[Ending]]:
    start = time.monotonic()
    running = {}
    files = [[folder / f"{number}-{rank}" for rank in range(run.ranks)] for number, run in enumerate(runs)]
    for number, run in enumerate(runs):
        for rank in range(run.ranks):
            process = os.fork()
            if process == 0:
                _be(rank, run, folder / f"{number}-store", files[number][rank])
            running[process] = files[number][rank]
    seconds = {file: limit for of_run in files for file in of_run}
    while running and time.monotonic() < start + limit:
        process, _ = os.waitpid(-1, os.WNOHANG)
        if process in running:
            seconds[running.pop(process)] = time.monotonic() - start
        elif len(running) <= len(runs) and all(map(_is_stopped, running)):
            break  # they will never end by themselves
        else:
            time.sleep(0.005)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return [
        [Ending(file.read_text() if file.exists() else None, seconds[file]) for file in of_run]
        for of_run in files
    ]


def _is_stopped(process: int) -> bool:
    return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _be(rank: int, run: Run, store: Path, result: Path) -> None:
    """The life of a rank. It ends as a process does that is through with it all, and hangs up."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        join_world(World(rank, run.ranks, rank, run.ranks, "plait", f"file://{store}"), 30.0, "cpu")
        text = run.function(*run.arguments)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    result.write_text(text)
    os._exit(0)
