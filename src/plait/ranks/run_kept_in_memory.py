"""Engine and optimizer that a rank's process keeps in memory while its process group is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from plait.ranks.exchange_with_supervisor import generation_of_rank, supervisor_of_rank


@dataclass(frozen=True, eq=False)
class KeptRun:
    """An engine and its optimizers between two steps, in memory."""

    engine: Any
    optimizer: Any
    step: int
    """The number of finished steps."""
    state: Mapping[str, Any]
    """The user's own state."""
    run_state: Mapping[str, Any]
    """The engine's `run_state` at that step; it may have begun the next one."""
    generation: int = 0
    """The number of the world in which it was kept."""


_KEPT: ContextVar[KeptRun | None] = ContextVar("plait_kept_run", default=None)
_IS_USED: ContextVar[bool] = ContextVar("plait_kept_run_is_used", default=False)


def keeps_runs() -> bool:
    """Return whether this process keeps runs: it has a supervisor and has called `take_kept_run`.

    The supervisor restarts the function, which takes the run.
    """
    return _IS_USED.get() and bool(supervisor_of_rank())


def keep_run(run: KeptRun) -> None:
    """Store `run` in this process, for the next call of the launched function."""
    _KEPT.set(replace(run, generation=generation_of_rank()))


def forget_connections_of_kept_run() -> bool:
    """Drop the connections of the stored run, whose world has failed; return whether one is stored.

    One of an earlier world is dropped, since nothing takes it any more.
    """
    kept = _KEPT.get()
    if kept is None or kept.generation != generation_of_rank():
        _KEPT.set(None)
        return False
    kept.engine.mesh.forget_connections()
    return True


def drop_kept_run() -> None:
    """Remove the stored run, if any: this process is not in the next world, and later ones cannot use it."""
    _KEPT.set(None)


def take_kept_run() -> KeptRun | None:
    """Return and remove the run that this process stored in the previous world; None if there is none.

    From the first call on the process `keeps_runs`.
    """
    _IS_USED.set(True)
    kept = _KEPT.get()
    _KEPT.set(None)
    return kept if kept is not None and kept.generation == generation_of_rank() - 1 else None


def take_moved_run(engine: Any) -> KeptRun | None:
    """Return and remove the stored run if its engine is `engine`; else remove it and return None."""
    kept = _KEPT.get()
    _KEPT.set(None)
    return kept if kept is not None and kept.engine is engine else None
