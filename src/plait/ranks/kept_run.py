"""The run that a rank's process keeps when its world changes: the function that is called again goes on."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from plait.ranks.supervised_rank import generation_of_rank, supervisor_of_rank


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
    """Return whether the function that this process runs asks for kept runs, and a supervisor restarts it."""
    return _IS_USED.get() and bool(supervisor_of_rank())


def keep_run(run: KeptRun) -> None:
    """Keep a run for the next call of the function."""
    _KEPT.set(replace(run, generation=generation_of_rank()))


def take_kept_run() -> KeptRun | None:
    """Return the run that this process has kept in the world before, and keep it no longer; None without one.

    From the first call on the process `keeps_runs`.
    """
    _IS_USED.set(True)
    kept = _KEPT.get()
    _KEPT.set(None)
    return kept if kept is not None and kept.generation == generation_of_rank() - 1 else None


def take_moved_run(engine: Any) -> KeptRun | None:
    """Return the run that goes on with this engine, and forget any that was kept; None: there is none."""
    kept = _KEPT.get()
    _KEPT.set(None)
    return kept if kept is not None and kept.engine is engine else None
