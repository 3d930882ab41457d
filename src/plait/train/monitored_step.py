"""`MonitoredStep`: one step of a training run with its metrics, checks, validation, trace and progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from plait.comm.mesh import Mesh
from plait.device import is_accelerator
from plait.errors import ReplicaError
from plait.train.balance_reorder_trace import reorder, write_trace
from plait.train.config import Config
from plait.train.meter import Meter, StepNumbers
from plait.train.metrics import Metrics
from plait.train.progress import ProgressReporter
from plait.train.reference_steps import LossAndNorm
from plait.train.stop_signals import StopSignals
from plait.train.trainer import Trainer


@dataclass
class MonitoredStep:
    """Runs the steps of a training run on one rank, with metrics, replica checks, validation and recording.

    On a GPU the metrics of a step are read after the next one has been submitted, so that the host does not
    wait for the device; at once where something else needs the end of the step.
    """

    config: Config
    trainer: Trainer
    mesh: Mesh
    meter: Meter
    metrics: Metrics
    progress: ProgressReporter
    stop: StopSignals
    loss: float = math.nan
    """Loss of the last step."""
    peak_memory: float = 0.0
    """Bytes, the largest over ranks."""
    validation_loss: float | None = None
    """The latest validation loss."""
    first: list[LossAndNorm] = field(default_factory=list)
    """Results of the first `run.compare` steps."""
    _unread: tuple[int, Callable[[], StepNumbers]] | None = None
    """The step whose metrics were not read yet, and the function that waits for them."""

    def run(self, step: int) -> None:
        """Train on the batch of `step`, counted from 0. Raises `NonFiniteError` and `ReplicaError`."""
        config, trainer, meter = self.config, self.trainer, self.meter
        meter.start()
        records = step + 1 in (config.run.trace, config.parallel.reorder)
        with trainer.engine.recording() if records else nullcontext() as recording:
            loss, norm = trainer.step(step)
        rate, non_finite = trainer.learning_rate(step), trainer.engine.non_finite()
        numbers = meter.measure(step, loss, norm, rate, non_finite, self.stop.local)
        self.finish()
        self._unread = step, numbers
        if recording is not None or not is_accelerator(self.mesh.device) or self._is_followed(step):
            self.finish()
        if recording is not None and step + 1 == config.run.trace:
            self.progress.print(write_trace(recording, step + 1, config.run.dir, self.mesh))
        if recording is not None and step + 1 == config.parallel.reorder:
            self.progress.print(reorder(trainer.engine, recording, step + 1, config.run.dir, self.mesh))

    def finish(self) -> None:
        """If a step's metrics are unread, read, show and write them; check replicas and validate if due."""
        if self._unread is None:
            return
        (step, read), self._unread = self._unread, None
        numbers = read()
        row = numbers.row
        self.stop.received = numbers.signal
        self.trainer.refuse_non_finite(step, numbers)
        if self._checks_replicas(step):
            self._check_replicas(step)
        self.progress.update(step + 1, row["loss"], row["tokens_per_second"])
        if self._validates(step):
            self.validation_loss = self.trainer.validate(step)
            if self.validation_loss is not None:
                row["validation_loss"] = self.validation_loss
                self.progress.print(f"step {step + 1}: validation loss {self.validation_loss:.3f}")
        if failure := self.metrics.write(row):
            self.progress.print(f"WARNING: {failure}")
        self.loss, self.peak_memory = row["loss"], row["peak_memory_bytes"]
        if step == len(self.first) < self.config.run.compare:
            self.first.append((row["loss"], row["grad_norm"]))

    def _is_followed(self, step: int) -> bool:
        """Return whether a replica check or a validation is due between `step` and the next step."""
        return self._checks_replicas(step) or self._validates(step)

    def _checks_replicas(self, step: int) -> bool:
        every = self.config.run.check_replicas
        return every > 0 and (step + 1) % every == 0

    def _check_replicas(self, step: int) -> None:
        try:
            self.trainer.engine.check_replicas(self.trainer.optimizer)
        except ReplicaError as error:
            raise ReplicaError(f"step {step + 1}: {error}") from None

    def _validates(self, step: int) -> bool:
        every = self.config.train.validate_every
        return step + 1 == self.config.train.steps or (every > 0 and (step + 1) % every == 0)
