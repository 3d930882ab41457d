"""The processes between a rank and its launcher, and the identity of one run of a launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_OPTION_OF_RUN = re.compile(r"--(?:control-port|upstream-port)[ =](\S+)")
"""Of a proxy of the `mpiexec` of MPICH or Intel MPI: where `mpiexec` listens, on whichever host."""


def parents_up_to_launcher(mark: str) -> Mapping[int, int]:
    """Return parent ids by process id, from this process up to the launcher, which lacks the variable `mark`.

    The launcher is the first ancestor that was started without the environment variable `mark`, or whose
    environment cannot be read, such as a daemon of Slurm; it is the last parent. Outside Linux only the
    parent of this process is known.
    """
    process = os.getpid()
    parents: dict[int, int] = {}
    while True:
        parent = parent_of(process)
        if parent is None:
            return parents
        parents[process] = parent
        if not _started_with(parent, mark):
            return parents
        process = parent


def parent_of(process: int) -> int | None:
    """Return the id of a process's parent; None where that is unknown."""
    if process == os.getpid():
        return os.getppid()
    try:
        stat = Path("/proc", str(process), "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _started_with(process: int, variable: str) -> bool:
    """Return whether a process was started with an environment variable; False where that is unreadable."""
    try:
        environment = Path("/proc", str(process), "environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(f"{variable}=".encode()) for entry in environment.split(b"\0"))


def run_of_launcher(mark: str) -> str:
    """Return the address at which the MPICH or Intel `mpiexec` of this rank listens; "" for other launchers.

    The same for all its ranks, and another for each `mpiexec`, which gives its ranks no job id. From the
    command line of its proxy on this host, a parent of the rank. `mark`: as for `parents_up_to_launcher`.
    """
    for process in _ancestors(_launcher(mark)):
        if found := _OPTION_OF_RUN.search(_read(process, "cmdline").replace("\0", " ")):
            return found.group(1)
    return ""


def process_of_launcher(mark: str) -> str:
    """Return the id and start time of the launcher's process on this host, which identify one run of it."""
    launcher = _launcher(mark)
    started = _read(launcher, "stat").rpartition(")")[2].split()[19:20]
    return "-".join([str(launcher), *started])


def _launcher(mark: str) -> int:
    return [os.getpid(), *parents_up_to_launcher(mark).values()][-1]


def _ancestors(process: int) -> Iterator[int]:
    """Yield `process`, its parent, and so on."""
    parent: int | None = process
    while parent:
        yield parent
        parent = parent_of(parent)


def _read(process: int, file: str) -> str:
    """Return a file of `/proc` about a process; "" where it cannot be read."""
    try:
        return Path("/proc", str(process), file).read_text(errors="replace")
    except OSError:
        return ""
