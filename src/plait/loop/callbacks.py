"""Callbacks for validation, early stopping, replica checks and logging."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from plait.data.batches import Batches
from plait.errors import NonFiniteError, ReplicaError
from plait.loop.loggers import Logger, LoggerGroup
from plait.loop.training import Callback, TrainingLoop, require_divisible


class Validation(Callback):
    """Puts the mean loss over `count` validation batches into the row, every `every` steps and at the end."""

    def __init__(
        self,
        batches: Batches | None,
        *,
        every: int = 0,
        count: int = 1,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`every` 0: at the end only; no `batches`: never. `tell` gets a line about each validation."""
        self._batches, self._every, self._count, self._tell = batches, every, count, tell
        self._last = 0
        self.loss: float | None = None
        """The latest validation loss."""

    def begin(self, run: TrainingLoop) -> None:
        """Check that the data-parallel ranks can share a batch. Raises `DataError`."""
        self._last = run.steps
        if self._batches is not None:
            self._rows = require_divisible(self._batches, run)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the last one or a multiple of `every`."""
        at_end, every = step == self._last, self._every
        return self._batches is not None and (at_end or (every > 0 and step % every == 0))

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Add `validation_loss`, equal on every rank. Raises `NonFiniteError`."""
        step = int(row["step"])
        if self._batches is None or not self.is_due(step):
            return
        total = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
        for number in range(self._count):
            total += run.engine.evaluate(*self._batches.batch(number, self._rows))
        self.loss = float(total) / self._count
        if not math.isfinite(self.loss):
            raise NonFiniteError(
                f"step {step}: the validation loss is {self.loss} after it, seen on the last stage: "
                f"{run.advice}."
            )
        row["validation_loss"] = self.loss
        if self._tell is not None:
            self._tell(f"step {step}: validation loss {self.loss:.3f}")


class EarlyStop(Callback):
    """Ends the run after `patience` validations in a row without a lower validation loss."""

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._worse = patience, math.inf, 0

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Count validations without a lower loss; stop the run on all ranks where there were enough."""
        loss = row.get("validation_loss")
        if loss is None:
            return
        self._worse = 0 if loss < self._best else self._worse + 1
        self._best = min(self._best, loss)
        if self._worse >= self._patience:
            run.stop()


class ReplicaChecks(Callback):
    """Compares parameters and optimizer state that several ranks hold, every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
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

    def __init__(
        self, *loggers: Logger, folder: Path = Path(), field: str = "", tell: Callable[[str], None] = print
    ) -> None:
        """`folder`, and its `field` of a configuration, name the place where a logger fails.

        `tell` gets a warning where one begins to fail.
        """
        self._loggers, self._tell = LoggerGroup(loggers, folder, field), tell

    def begin(self, run: TrainingLoop) -> None:
        """Open the loggers; rows of steps after a resumption are dropped."""
        if run.mesh.rank == 0:
            self._loggers.begin(run.resumed_steps)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Write the row."""
        if run.mesh.rank == 0 and (failure := self._loggers.write(row)):
            self._tell(f"WARNING: {failure}")

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Close the loggers."""
        if run.mesh.rank == 0:
            self._loggers.close(error)
