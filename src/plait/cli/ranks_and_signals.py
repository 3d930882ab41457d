"""Around commands that run ranks: a world that fits, signals, and an end without leftovers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from plait.errors import ConfigError
from plait.plan import Plan

_MOST_LOCAL, _MOST_A_CORE = 64, 8
"""Ranks that are started here: each is a process."""


@contextmanager
def importing() -> Iterator[None]:
    """While torch is imported, Ctrl-C ends the process at once: the import swallows it now and then."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def stoppable(*, local: bool) -> Iterator[list[int]]:
    """Around a run that can end after any step: the first SIGINT or SIGTERM is a wish, the second ends it.

    Gives the signals that this process has got, where its ranks are `local`; it passes the wish on to them.
    """
    from plait.comm.rank_process import STOP_SIGNAL
    from plait.comm.signal_handling import GracefulStop

    got: list[int] = []

    def pass_on(number: int) -> None:
        children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        if not children:  # nothing has begun that could be finished
            wish.leave(number)
            return
        got.append(number)
        name = signal.Signals(number).name
        print(f"plait: {name}: stops after this step; once more stops at once.", file=sys.stderr)
        for child in children:
            os.kill(child, STOP_SIGNAL)

    with GracefulStop((signal.SIGINT, signal.SIGTERM) if local else (), pass_on) as wish:
        yield got


@contextmanager
def local_ranks(ranks: int, needed_by: str) -> Iterator[bool]:
    """Around a launch of `ranks` ranks, here or in a launcher's world of that size.

    Gives whether this process is the one that speaks. `needed_by` completes "… needs 4 ranks". Raises
    ConfigError for a world of another size, and for more local ranks than a machine can carry.
    """
    from plait.comm.pool import stop_fork_server
    from plait.comm.world import find_world

    world = find_world()
    if world is not None and world.world_size != ranks:
        raise ConfigError(
            f"{needed_by} needs {ranks} ranks, but {world.launcher} started {world.world_size}: "
            f"start {ranks}, or change the degrees."
        )
    most = max(_MOST_LOCAL, _MOST_A_CORE * (os.cpu_count() or 1))
    if world is None and ranks > most:
        raise ConfigError(
            f"{needed_by} needs {ranks} ranks, and this machine starts at most {most}: "
            "lower the degrees, or start the ranks on several hosts with torchrun."
        )
    if world is None:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield world is None or world.rank == 0
    finally:
        stop_fork_server()


def end_rank(code: int) -> None:
    """End the process with `code` where it is a rank of a launcher's world; elsewhere return.

    After a lost peer: the timeout has passed already, and unloading torch would take a second or two more.
    """
    from plait.comm.world import find_world

    if find_world() is not None:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def degrees(plan: Plan) -> str:
    """What a plan's ranks are the product of, for a sentence."""
    return f"parallel.pp = {plan.pp} times parallel.dp = {plan.dp} times parallel.tp = {plan.tp}"


def _terminate(number: int, frame: object) -> None:
    """SIGTERM to the parent of local ranks: unwind, so that they end and temporary folders go."""
    print("plait: terminated.", file=sys.stderr)
    raise SystemExit(128 + number)
