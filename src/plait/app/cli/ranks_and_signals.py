"""Context managers of commands that run ranks: number of ranks, signals, imports."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from plait.errors import ConfigError
from plait.plan.axes import PLAN_AXES
from plait.plan.plan import Plan

_MOST_LOCAL, _MOST_A_CORE = 64, 8
"""Limits on local ranks: each is a process."""


@contextmanager
def importing() -> Iterator[None]:
    """Context for `import torch`: Ctrl-C ends the process, as the import may swallow KeyboardInterrupt.

    The first import leaves its objects out of garbage collection, now and at the end of the process, which
    would take half a second to free nothing.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    uncollected = "torch" not in sys.modules and gc.isenabled()
    if uncollected:
        gc.disable()
    try:
        yield
    finally:
        if uncollected:
            gc.freeze()
            gc.enable()
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def stoppable(*, local: bool) -> Iterator[list[int]]:
    """Context: if `local`, the first SIGINT or SIGTERM stops a run after its current step, a second at once.

    Yield the list of signals that this process has received and forwarded to its `local` ranks.
    """
    from plait.ranks.failure.process_watch import GracefulStop
    from plait.ranks.launch.fork_server import started_processes
    from plait.ranks.launch.rank_main_loop import STOP_SIGNAL

    received: list[int] = []

    def forward(number: int) -> None:
        known = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        children = list(dict.fromkeys([*known, *started_processes()]))
        if not children:  # no rank has started
            stop.restore_and_raise(number)
            return
        received.append(number)
        name = signal.Signals(number).name
        print(f"plait: {name}: stops after this step; once more stops at once.", file=sys.stderr)
        for child in children:
            with suppress(ProcessLookupError):  # lost just now: the others stop, or the one in its place
                os.kill(child, STOP_SIGNAL)

    with GracefulStop((signal.SIGINT, signal.SIGTERM) if local else (), forward) as stop:
        yield received


@contextmanager
def local_ranks(ranks: int, subject: str, *, of_supervisors: bool = False) -> Iterator[bool]:
    """Context: check that `ranks` ranks can be started or already run; yield whether this process prints.

    `subject` is the subject of "… needs 4 ranks" in errors. `of_supervisors`: a launcher, if any, has
    started a process on each host that starts the ranks. Raises ConfigError for a world of another size, and
    for too many local ranks.
    """
    from plait.ranks.launcher_environment import find_world

    world = find_world()
    starts_ranks = world is None or of_supervisors
    if world is not None and not starts_ranks and world.world_size != ranks:
        raise ConfigError(
            f"{subject} needs {ranks} ranks, but {world.launcher} started {world.world_size}: "
            f"start {ranks}, or change the degrees."
        )
    most = max(_MOST_LOCAL, _MOST_A_CORE * (os.cpu_count() or 1))
    here = ranks if world is None else ranks // world.world_size
    if starts_ranks and here > most:
        raise ConfigError(
            f"{subject} needs {here} ranks, and this machine starts at most {most}: "
            "lower the degrees, or start the ranks on several hosts with torchrun."
        )
    if starts_ranks:
        signal.signal(signal.SIGTERM, _terminate)
    yield world is None or world.rank == 0


def end_rank(code: int) -> None:
    """Exit with `code` if this process is a launcher's rank: unloading torch would take another second."""
    from plait.ranks.launcher_environment import find_world

    if find_world() is not None:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def degrees(plan: Plan) -> str:
    """Return the degrees of a plan as text for errors: "parallel.pp = 2 times parallel.dp = 1 times …"."""
    shown = [name for name in PLAN_AXES if name != "cp" or plan.cp > 1]
    return " times ".join(f"parallel.{name} = {getattr(plan, name)}" for name in shown)


def _terminate(number: int, frame: object) -> None:
    """Handle SIGTERM by raising SystemExit, so that local ranks end and temporary folders are removed."""
    print("plait: terminated.", file=sys.stderr)
    raise SystemExit(128 + number)
