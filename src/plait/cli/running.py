"""Around commands that run ranks: a world that fits, signals, and an end without leftovers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from plait.errors import ConfigError
from plait.plan import Plan


@contextmanager
def importing() -> Iterator[None]:
    """While torch is imported, Ctrl-C ends the process at once: the import swallows it now and then."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def local_ranks(ranks: int, needed_by: str) -> Iterator[bool]:
    """Around a launch of `ranks` ranks, here or in a launcher's world of that size.

    Gives whether this process is the one that speaks. `needed_by` completes "… needs 4 ranks". Raises
    ConfigError for a world of another size.
    """
    from plait.comm.pool import stop_fork_server
    from plait.comm.world import find_world

    world = find_world()
    if world is not None and world.world_size != ranks:
        raise ConfigError(
            f"{needed_by} needs {ranks} ranks, but {world.launcher} started {world.world_size}: "
            f"start {ranks}, or change the degrees."
        )
    if world is None:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield world is None or world.rank == 0
    finally:
        stop_fork_server()


def degrees(plan: Plan) -> str:
    """What a plan's ranks are the product of, for a sentence."""
    return f"parallel.pp = {plan.pp} times parallel.dp = {plan.dp} times parallel.tp = {plan.tp}"


def _terminate(number: int, frame: object) -> None:
    """SIGTERM to the parent of local ranks: unwind, so that they end and temporary folders go."""
    print("plait: terminated.", file=sys.stderr)
    raise SystemExit(128 + number)
