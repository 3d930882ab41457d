"""The processes above a rank, from `/proc`: its launcher, torchrun's agent, and their environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"


_OPTION_OF_RUN = re.compile(r"--(?:control-port|upstream-port)[ =](\S+)")
"""Of a proxy of the `mpiexec` of MPICH or Intel MPI: where `mpiexec` listens, on whichever host."""


def run_of_launcher(mark: str) -> str:
    """Return text that identifies this rank's run under MPICH's or Intel's `mpiexec`; "" under others.

    It is the address at which `mpiexec` listens: the same for all its ranks, which get no job id. From the
    command line of its proxy on this host, a parent of the rank. `mark`: as for `parents_up_to_launcher`.
    """
    process: int | None = _launcher(mark)
    while process:
        if found := _OPTION_OF_RUN.search(_process_file(process, "cmdline").replace("\0", " ")):
            return found.group(1)
        process = parent_of(process)
    return ""


def process_of_launcher(mark: str) -> str:
    """Return the process id and start time, as text, of this rank's launcher on this host."""
    return process_identity(_launcher(mark))


def process_of_agent() -> str:
    """Return id and start time of the torchrun agent that restarts this rank, as text; "" without one."""
    return process_of_launcher(RUN_ID) if RUN_ID in os.environ else ""


def process_identity(process: int) -> str:
    """Return a process's id and start time, as text; only the id where the process has ended."""
    started = _process_file(process, "stat").rpartition(")")[2].split()[19:20]
    return "-".join([str(process), *started])


def parents_up_to_launcher(mark: str) -> Mapping[int, int]:
    """Return each process's parent, from this process up to its launcher, which lacks variable `mark`.

    The launcher is the first ancestor that was started without the environment variable `mark`, or whose
    environment cannot be read, such as a daemon of Slurm; it is the last parent. Outside Linux only the
    parent of this process is known.
    """
    process = os.getpid()
    parents: dict[int, int] = {}
    while (parent := parent_of(process)) is not None:
        parents[process] = parent
        if not any(entry.startswith(f"{mark}=") for entry in environment_of(parent)):
            break
        process = parent
    return parents


def parent_of(process: int) -> int | None:
    """Return the id of a process's parent; None where that is unknown."""
    if process == os.getpid():
        return os.getppid()
    stat = _process_file(process, "stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def environment_of(process: int) -> list[str]:
    """Return the `NAME=VALUE` entries a process was started with; [] if the system does not show them."""
    return list(filter(None, _process_file(process, "environ").split("\0")))


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal, as by SIGSTOP."""
    return _process_file(process, "stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def _launcher(mark: str) -> int:
    return [os.getpid(), *parents_up_to_launcher(mark).values()][-1]


def _process_file(process: int, file: str) -> str:
    """Return a file of `/proc` about a process; "" where it cannot be read."""
    try:
        return Path("/proc", str(process), file).read_text(errors="replace")
    except OSError:
        return ""
