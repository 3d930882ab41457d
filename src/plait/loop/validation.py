"""Validation during a run: its loss and metrics, the lowest loss so far, and the end of a run without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.data.batches import Batches, description
from plait.data.loader import Loader
from plait.device import sent
from plait.errors import ConfigError, DataError, NonFiniteError
from plait.layers.nested import map_tensors
from plait.loop.batch_shares import require_divisible
from plait.loop.training import Callback, TrainingLoop

Metric = Callable[[Any, Any], Tensor]
"""Function of the model's whole output and the targets: one value for each row or token that counts."""


@dataclass(frozen=True)
class LowestLoss:
    """The lowest validation loss of a run, and the step after which it was measured."""

    step: int
    loss: float


class Validation(Callback):
    """Puts the mean loss of validation batches into the row, every `every` steps and at the end."""

    def __init__(
        self,
        batches: Batches | None,
        *,
        every: int = 0,
        count: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        """Use the first `count` batches; None: all samples of a `Loader` once, one batch of others.

        `every` 0: at the end only; no `batches`: never. The mean of each of `metrics` over all values that it
        returns for these batches is added to the row as `validation_NAME`.
        """
        if "loss" in (metrics or {}):
            raise ConfigError("a metric is called loss, as the validation loss is: give it another name.")
        self._batches, self._every, self._metrics = batches, every, dict(metrics or {})
        self._count = count or (batches.steps() if isinstance(batches, Loader) else 1)
        self._last = 0
        self._rows = slice(0)
        self._is_anew = False
        self.loss: float | None = None
        """The latest validation loss."""
        self.lowest: LowestLoss | None = None
        """The lowest validation loss, also of steps before the run was resumed."""
        self.worse = 0
        """The number of validations since then."""

    @property
    def is_regular(self) -> bool:
        """Whether there are validations before the end of the run."""
        return self._batches is not None and self._every > 0

    def begin(self, run: TrainingLoop) -> None:
        """Check that the data-parallel ranks can share a batch. Raises `DataError`."""
        self._last = run.steps
        if self._is_anew:
            run.tell("Validation data differ from those before: the lowest validation loss is searched anew.")
        if self._batches is not None:
            self._rows = require_divisible(self._batches, run.mesh)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the last one or a multiple of `every`."""
        at_end, every = step == self._last, self._every
        return self._batches is not None and (at_end or (every > 0 and step % every == 0))

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Add `validation_loss` and the metrics, equal on every rank. Raises `NonFiniteError`."""
        step = int(row["step"])
        if self._batches is None or not self.is_due(step):
            return
        means = self._measure(self._batches, run)
        loss = means["validation_loss"]
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {step}: the validation loss is {loss} after it, seen on the last stage: {run.advice}."
            )
        row.update(means)
        is_lowest = self.lowest is None or loss < self.lowest.loss
        self.loss, self.worse = loss, 0 if is_lowest else self.worse + 1
        if is_lowest:
            self.lowest = LowestLoss(step, loss)
        others = "".join(f", {name} {means[f'validation_{name}']:.3f}" for name in self._metrics)
        run.tell(f"step {step}: validation loss {loss:.3f}{others}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the lowest loss, the validations since then, and the data of which it is."""
        if self.lowest is None:
            return {}
        return {
            "step": self.lowest.step,
            "loss": self.lowest.loss,
            "worse": self.worse,
            "data": self._description(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the lowest loss of a `state_dict`, unless it is of other validation data."""
        self._is_anew = self._batches is not None and state["data"] != self._description()
        if not self._is_anew:
            self.lowest, self.worse = LowestLoss(state["step"], state["loss"]), state["worse"]

    def _description(self) -> dict[str, Any]:
        return {} if self._batches is None else {"batches": self._count, **description(self._batches)}

    def _measure(self, batches: Batches, run: TrainingLoop) -> dict[str, float]:
        """Return the means of the loss and of the metrics over all that counts in the batches.

        Communication: that of `evaluate`; with metrics that of `output`, and an all-reduce over `world`.
        Raises `DataError` where no target counts.
        """
        device = run.mesh.device
        loss, weight = torch.zeros(2, dtype=torch.float64, device=device)
        sums = torch.zeros(len(self._metrics), 2, dtype=torch.float64, device=device)
        for number in range(self._count):
            inputs, targets = batches.batch(number, self._rows)
            mean, counted = run.engine.evaluate(inputs, targets), run.engine.loss_weight()
            loss += torch.where(
                counted > 0, mean * counted, 0.0
            )  # of a batch in which no target counts, 0 / 0
            weight += counted
            if self._metrics:
                sums += self._sums(run, inputs, targets)
        if not weight:
            raise DataError(
                "no target of the validation data counts: all are -100, as where answers are cut off. Give "
                "other data, or validate more batches."
            )
        means = {"validation_loss": float(loss / weight)}
        if self._metrics:
            # Ranks of tp and cp have the same values, and count them as often as each other.
            total = all_reduce(sums, run.mesh.group("world"), checked=False).about("the metrics").wait()
            for name, (value, count) in zip(self._metrics, total.tolist(), strict=True):
                means[f"validation_{name}"] = value / count if count else math.nan
        return means

    def _sums(self, run: TrainingLoop, inputs: Any, targets: Any) -> Tensor:
        """Return sum and number of each metric's values, `[metrics, 2]`; zeros but on the last stage."""
        output, device = run.engine.output(inputs, everywhere=False), run.mesh.device
        if output is None:
            return torch.zeros(len(self._metrics), 2, dtype=torch.float64, device=device)
        targets = map_tensors(lambda one: sent(one, device), targets)
        found = [torch.as_tensor(metric(output, targets)).double() for metric in self._metrics.values()]
        return torch.stack([torch.stack([one.sum(), torch.ones_like(one).sum()]) for one in found])


class EarlyStop(Callback):
    """Ends the run after `patience` validations in a row without a lower validation loss."""

    def __init__(self, patience: int) -> None:
        """Place it after the `Validation` whose losses it compares. Raises `ConfigError`."""
        if patience < 1:
            raise ConfigError(f"EarlyStop has patience = {patience}: give at least 1, or leave it out.")
        self._patience = patience
        self._validation = Validation(None)

    def begin(self, run: TrainingLoop) -> None:
        """Find the validation; end a run that had ended before it was resumed. Raises `DataError`."""
        self._validation = validation_before(self, run)
        self._stop_if_worse(run, run.done)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Stop the run on all ranks where enough validations had no lower loss."""
        if "validation_loss" in row:
            self._stop_if_worse(run, int(row["step"]))

    def _stop_if_worse(self, run: TrainingLoop, step: int) -> None:
        lowest, worse = self._validation.lowest, self._validation.worse
        if lowest is not None and worse >= self._patience and not run.stopped:
            run.tell(
                f"The run ends after step {step}: {worse} validation{'s' * (worse > 1)} had no lower loss "
                f"than {lowest.loss:.3f}, that of step {lowest.step}."
            )
            run.stop()


def validation_before(callback: Callback, run: TrainingLoop) -> Validation:
    """Return the last callback before `callback` that validates during the run. Raises DataError if none."""
    before = takewhile(lambda other: other is not callback, run.callbacks)
    found = [other for other in before if isinstance(other, Validation) and other.is_regular]
    if not found:
        raise DataError(
            f"{type(callback).__name__} needs validation losses, but nothing before it in the list of "
            "callbacks validates during the run: give fit validation and validate_every, or place a "
            "Validation before it."
        )
    return found[-1]
