"""Callbacks for replica checks, logging, and the history of a run in memory."""

from __future__ import annotations

from pathlib import Path

from plait.app.loop.loggers import Logger, LoggerGroup
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.errors import ConfigError, ReplicaError
from plait.plan.arguments import require_whole


class ReplicaChecks(Callback):
    """Compares parameters and optimizer state that several ranks hold, every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        require_whole("ReplicaChecks' every", every, least=0)
        self._every = every

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every`."""
        return self._every > 0 and step % self._every == 0

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Compare the replicas. Raises `ReplicaError` with the step."""
        if self.is_due(int(row["step"])):
            try:
                run.engine.check_replicas(run.optimizer)
            except ReplicaError as error:
                raise ReplicaError(f"step {int(row['step'])}: {error}") from None


class Log(Callback):
    """Writes the numbers of each step to loggers, on rank 0. Place it after callbacks that add numbers."""

    def __init__(self, *loggers: Logger, folder: Path = Path(), field: str = "") -> None:
        """`folder`, and its `field` of a configuration, name the place where a logger fails."""
        for logger in loggers:
            if not all(callable(getattr(logger, name, None)) for name in ("begin", "write", "close")):
                raise ConfigError(
                    f"Log was given {logger!r}, without begin, write and close: give loggers, such as "
                    "plait.loop.JsonLines(path)."
                )
        self._loggers = LoggerGroup(loggers, folder, field)

    def begin(self, run: TrainingLoop) -> None:
        """Open the loggers; rows of steps after a resumption are dropped."""
        if run.mesh.rank == 0:
            self._loggers.begin(run.resumed_steps)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Write the row of this step to the loggers."""
        if run.mesh.rank == 0 and (failure := self._loggers.write(row)):
            run.tell(f"WARNING: {failure}")

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Close the loggers."""
        if run.mesh.rank == 0:
            self._loggers.close(error)


class History(Callback):
    """Keeps the numbers of each step in memory, on every rank; about 0.6 kB a step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        """The numbers of each step since the start or resumption, with what other callbacks added."""

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Append the numbers of this step to the history."""
        self.rows.append(row)
