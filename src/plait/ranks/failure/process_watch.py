"""Orphan watch: ends a rank process whose launcher has ended."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
from contextlib import suppress
from typing import NoReturn, Self

from plait.ranks.launcher_process import parent_of, parents_up_to_launcher
from plait.ranks.world import World

_MARKS = {
    "torchrun": "TORCHELASTIC_RUN_ID",  # a rank that was started by hand has RANK, and no agent
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pmi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}
"""An environment variable that a launcher sets for its ranks and does not have itself."""
_PERIOD = 0.5
"""Seconds between two checks."""


class OrphanWatch:
    """Context in which this process ends within a second after its launcher's process on this host is gone.

    A second thread compares the parents of this process, and of wrappers between it and the launcher, with
    those at the beginning: the system gives a process another parent when its own ends. It then writes one
    line to stderr and exits with 1. Ranks that were started by hand have no launcher and no watch.
    """

    def __init__(self, world: World) -> None:
        """Take from `world` the launcher to watch, and the rank that the message on stderr names."""
        self._world = world
        mark = _MARKS.get(world.launcher, "")
        self._parents = parents_up_to_launcher(mark) if mark in os.environ else {}
        self._left = threading.Event()

    @property
    def watches(self) -> bool:
        """Whether this rank has a launcher to watch."""
        return bool(self._parents)

    def __enter__(self) -> Self:
        if self.watches:
            threading.Thread(target=self._watch, name="plait-orphan-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(_PERIOD):
            if any(parent_of(process) != parent for process, parent in self._parents.items()):
                end_orphan(f"rank {self._world.rank}: {self._world.launcher}, which started it, is gone")


def end_orphan(reason: str) -> NoReturn:
    """End this process with exit code 1, after a line on stderr that begins with `reason`."""
    with suppress(OSError, ValueError):  # stderr may be closed, or a pipe that is full
        if select.select([], [2], [], _PERIOD)[1]:
            os.write(2, f"{reason}, so it ends.\n".encode())
    end_process(1)


def end_process(code: int) -> NoReturn:
    """Exit at once, whatever other threads do, and kill the processes started by multiprocessing.

    Workers of a `DataLoader` would end by themselves after up to five seconds, processes of a fork server
    never.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
