"""A step of a training run, with all that is looked at, told and written down around it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from plait.comm.mesh import Mesh
from plait.engine import Recording
from plait.errors import ReplicaError
from plait.train.compare import LossAndNorm
from plait.train.config import Config
from plait.train.meter import Meter
from plait.train.metrics import Metrics
from plait.train.order import reordered
from plait.train.progress import Follower
from plait.train.trace import recorded, write_trace
from plait.train.trainer import Trainer


class Stepper:
    """Takes the steps of a run, one after another, on every rank."""

    def __init__(
        self, config: Config, trainer: Trainer, mesh: Mesh, meter: Meter, metrics: Metrics, follower: Follower
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._mesh = mesh
        self._meter = meter
        self._metrics = metrics
        self._follower = follower
        self.loss = math.nan
        """Of the last step."""
        self.peak_memory = 0.0
        """Bytes, of the rank that had most."""
        self.validation_loss: float | None = None
        """The last one."""
        self.first: list[LossAndNorm] = []
        """Those of the first steps that are compared with a single rank's."""

    def step(self, step: int) -> None:
        """Train on the batch of `step`, counted from 0. Raises `NonFiniteError` and `ReplicaError`."""
        config, trainer = self._config, self._trainer
        self._meter.start()
        looked_at = step + 1 in (config.run.trace, config.parallel.reorder)
        with recorded(trainer.engine, wanted=looked_at) as recording:
            loss, norm = trainer.step(step)
        row = self._meter.row(step, loss, norm, trainer.rate(step))
        trainer.refuse_non_finite(step, row["loss"], row["grad_norm"])
        self._check_replicas(step)
        self._follower.update(step + 1, row["loss"], row["tokens_per_second"])
        if recording is not None:
            for line in self._looked_at(recording, step + 1):
                self._follower.note(line)
        if self._validates(step):
            self.validation_loss = trainer.validate(step)
            if self.validation_loss is not None:
                row["validation_loss"] = self.validation_loss
                self._follower.note(f"step {step + 1}: validation loss {self.validation_loss:.3f}")
        if flaw := self._metrics.write(row):
            self._follower.note(f"WARNING: {flaw}")
        self.loss, self.peak_memory = row["loss"], row["peak_memory_bytes"]
        if step == len(self.first) < config.run.compare:
            self.first.append((row["loss"], row["grad_norm"]))

    def _looked_at(self, recording: Recording, step: int) -> Iterator[str]:
        """What a step that was recorded is good for."""
        if step == self._config.run.trace:
            yield write_trace(recording, step, self._config.run.dir, self._mesh)
        if step == self._config.parallel.reorder:
            yield reordered(self._trainer.engine, recording, step, self._config.run.dir, self._mesh)

    def _check_replicas(self, step: int) -> None:
        every = self._config.run.check_replicas
        if every == 0 or (step + 1) % every:
            return
        try:
            self._trainer.engine.check_replicas(self._trainer.optimizer)
        except ReplicaError as error:
            raise ReplicaError(f"step {step + 1}: {error}") from None

    def _validates(self, step: int) -> bool:
        every = self._config.train.validate_every
        return step + 1 == self._config.train.steps or (every > 0 and (step + 1) % every == 0)
