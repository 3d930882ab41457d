"""Validation during a run: each row once, mean loss and metrics on any plan, and the lowest loss so far."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.app.data.batches import Batches, description, row_total
from plait.app.loop.stream import RankStream, Stream
from plait.app.loop.training_loop import Callback, TrainingLoop, require_batches
from plait.engine.engine import Engine
from plait.errors import ConfigError, DataError, NonFiniteError
from plait.pictures.quantities import duration_text
from plait.plan.argument_checks import require_instance, require_whole
from plait.ranks.accelerator import sent
from plait.ranks.collectives import all_reduce
from plait.tensor.nested_values import map_tensors


class RowShare(NamedTuple):
    """The rows of one validation batch that a data-parallel rank evaluates, and whether they count."""

    batch: int
    rows: slice
    """Within the batch; a rank without any takes one that does not count, to run with the others."""
    counted: bool
    """Whether they count."""


@dataclass(frozen=True)
class ValidationRows:
    """Which rows of `batches` a validation uses: all if their number is known, or `limit` batches."""

    batches: Batches
    limit: int | None = None
    """The most batches; None: all, or one where the data name no number of rows."""

    def __post_init__(self) -> None:
        if isinstance(self.batches, Stream | RankStream):
            raise DataError(
                "the validation data are a plait.Stream, whose rows come once, and each validation needs the "
                "same: give a plait.Loader of a list of some of its samples."
            )
        require_batches(self.batches)
        if self.total == 0:
            raise DataError("the validation data have 0 rows: give at least one, or no validation.")

    @property
    def total(self) -> int | None:
        """The number of rows of the data; None for endless data."""
        return row_total(self.batches)

    @property
    def count(self) -> int:
        """The number of rows that are taken."""
        if self.total is None:
            return self.batches.size * (self.limit or 1)
        return self.total if self.limit is None else min(self.total, self.limit * self.batches.size)

    @property
    def selection(self) -> str:
        """Text that says which rows are used; "" for all."""
        if self.total is not None:
            return f"the first {self.count} of {self.total} rows" if self.count < self.total else ""
        batches = "batch" if self.limit in (None, 1) else f"{self.limit} batches"
        unknown = ", since the data have no number of `rows`" if self.limit is None else ""
        return f"the first {batches}, {self.count} rows{unknown}"

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine which rows are used, as JSON values."""
        described = description(self.batches) | {"validated_rows": self.count}
        if self.total is not None:
            del described["size"]  # the rows are the same in batches of any size
        return described

    def shares(self, rank: int, ranks: int) -> Iterator[RowShare]:
        """Yield the rows of data-parallel rank `rank` of each batch; shares differ by one row at most."""
        size = self.batches.size
        for number, first in enumerate(range(0, self.count, size)):
            rows = min(size, self.count - first)
            begin, end = rank * rows // ranks, (rank + 1) * rows // ranks
            is_empty = begin == end
            yield RowShare(number, slice(0, 1) if is_empty else slice(begin, end), not is_empty)


Metric = Callable[[Any, Any], Tensor]
"""Function of the model's whole output and the targets: one value for each row or token that counts."""


def validation_means(data: ValidationRows, engine: Engine, metrics: Mapping[str, Metric]) -> list[float]:
    """Return the loss of all rows together, as of one batch, and the mean of each metric.

    Communication: that of `evaluate`; with metrics that of `output`, and an all-reduce over `world`.
    Raises `DataError` where no target counts.
    """
    mesh, device = engine.mesh, engine.mesh.device
    loss, weight = torch.zeros(2, dtype=torch.float64, device=device)
    sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
    for share in data.shares(mesh.index("dp"), mesh.size("dp")):
        inputs, targets = data.batches.batch(share.batch, share.rows)
        mean = engine.evaluate(inputs, targets, rows=None if share.counted else 0)
        counted = engine.loss_weight()
        total = mean * counted if engine.averages_loss else mean
        loss += torch.where(counted > 0, total, 0.0)  # of a batch in which no target counts, 0 / 0
        weight += counted
        if metrics:
            found = _sums(engine, metrics, inputs, targets)  # on all ranks, for its communication
            sums += found.where(torch.tensor(share.counted, device=device), 0.0)
    if not weight:
        raise DataError(
            "no target of the validation data counts: all are -100, as where answers are cut off. Give "
            "other data, or validate more batches."
        )
    means = [float(loss / weight if engine.averages_loss else loss)]
    if metrics:
        # Ranks of tp and cp have the same values, and count them as often as each other.
        total = all_reduce(sums, mesh.group("world"), checked=False).about("the metrics").wait()
        means += [value / count if count else math.nan for value, count in total.tolist()]
    return means


def _sums(engine: Engine, metrics: Mapping[str, Metric], inputs: Any, targets: Any) -> Tensor:
    """Return sum and number of each metric's values, `[metrics, 2]`; zeros but on the last stage."""
    output, device = engine.output(inputs, everywhere=False), engine.mesh.device
    if output is None:
        return torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
    targets = map_tensors(lambda one: sent(one, device), targets)
    found = []
    for name, metric in metrics.items():
        values = torch.as_tensor(metric(output, targets)).double()
        if not values.dim():
            raise DataError(
                f"the metric {name} returned one number, of which no mean over batches of unlike sizes "
                "can be made: return a value for each row or token, as output.argmax(1) == targets has."
            )
        found.append(torch.stack([values.sum(), torch.ones_like(values).sum()]))
    return torch.stack(found)


_LONG = 15.0
"""Seconds of a validation that is announced."""


@dataclass(frozen=True)
class LowestLoss:
    """The lowest validation loss of a run, and the step after which it was measured."""

    step: int
    loss: float


class Validation(Callback):
    """Adds the mean loss over validation data to the logged row, every `every` steps and at the end."""

    def __init__(
        self,
        batches: Batches | None,
        *,
        every: int = 0,
        count: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        name: str = "",
    ) -> None:
        """Use each row of `batches` once; with `count` those of the first `count` batches.

        Data without a number of `rows`, which a `Loader` has, are endless: of them the first batch is used
        where `count` is None. `every` 0: at the end only; no `batches`: never. The loss is `validation_loss`
        in the row, and the mean of each of `metrics` over all values that it returns is
        `validation_METRIC`; with a `name` they are `validation_NAME_loss` and `validation_NAME_METRIC`.
        Raises `ConfigError` for other arguments.
        """
        require_whole("Validation's every", every, least=0)
        if count is not None:
            require_whole("Validation's count", count)
        if metrics is not None:
            require_instance("Validation's metrics", metrics, Mapping, "give a dictionary of functions")
        self.name, self._metrics = name, _named_metrics(metrics or {})
        if name != "" and not _is_name(name):
            raise ConfigError(f"a Validation is called {name!r}: {_NAMES}.")
        self._prefix = f"validation_{name}_" if name else "validation_"
        self._data = None if batches is None else ValidationRows(batches, count)
        self._every = every
        self._run: TrainingLoop | None = None
        self._is_anew = False
        self.loss: float | None = None
        """The latest validation loss."""
        self.lowest: LowestLoss | None = None
        """The lowest validation loss, also of steps before the run was resumed."""
        self.worse = 0
        """The number of validations since then."""

    @property
    def key(self) -> str:
        """The name of the validation's state in checkpoints."""
        return f"Validation {self.name}" if self.name else "Validation"

    @property
    def loss_name(self) -> str:
        """The name of the validation loss in the row of metrics."""
        return f"{self._prefix}loss"

    @property
    def is_regular(self) -> bool:
        """Whether the data are also validated during the run, and not only at its end."""
        return self._data is not None and self._every > 0

    def begin(self, run: TrainingLoop) -> None:
        """Print which rows are used, unless all. ConfigError if two validations use the same names."""
        self._run = run
        if self._is_anew:
            run.tell("Validation data differ from those before: the lowest validation loss is searched anew.")
        if self._data is not None:
            _require_own_names(self, run)
            if self._data.selection:
                run.tell(f"{self.key} takes {self._data.selection}.")

    def names(self) -> list[str]:
        """Return the names of the validation's numbers in the row of metrics."""
        if self._data is None:
            return []
        return [self.loss_name, *(f"{self._prefix}{name}" for name in self._metrics)]

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the last one or a multiple of `every`."""
        at_end, every = self._run is not None and step == self._run.steps, self._every
        return self._data is not None and (at_end or (every > 0 and step % every == 0))

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """If due, add validation loss and metrics, equal on all ranks, to `row`. Raises `NonFiniteError`."""
        step = int(row["step"])
        if self._data is None or not self.is_due(step):
            return
        of_name = f" of {self.name}" if self.name else ""
        # A forward takes about a third of a step.
        seconds = row["step_seconds"] / 3 * self._data.count / run.batches.size
        if seconds > _LONG:
            run.tell(
                f"step {step}: the validation loss{of_name} is computed of {self._data.count:,} rows, in "
                f"about {duration_text(seconds)}."
            )
        loss, *others = validation_means(self._data, run.engine, self._metrics)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {step}: the validation loss{of_name} is {loss} after it, seen on the last stage: "
                f"{run.advice}."
            )
        row.update(zip(self.names(), [loss, *others], strict=True))
        is_lowest = self.lowest is None or loss < self.lowest.loss
        self.loss, self.worse = loss, 0 if is_lowest else self.worse + 1
        if is_lowest:
            self.lowest = LowestLoss(step, loss)
        means = "".join(f", {name} {mean:.3f}" for name, mean in zip(self._metrics, others, strict=True))
        run.tell(f"step {step}: validation loss{of_name} {loss:.3f}{means}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the lowest loss, the number of validations since, and a description of their data."""
        if self.lowest is None:
            return {}
        return {
            "step": self.lowest.step,
            "loss": self.lowest.loss,
            "worse": self.worse,
            "data": self._description(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the lowest loss from a `state_dict`, unless that is of other validation data."""
        self._is_anew = self._data is not None and state["data"] != self._description()
        if not self._is_anew:
            self.lowest, self.worse = LowestLoss(state["step"], state["loss"]), state["worse"]

    def _description(self) -> dict[str, Any]:
        return {} if self._data is None else self._data.describe()


_NAMES = "give a name of letters, digits and . _ - / @"


def _is_name(name: object) -> bool:
    """Return whether `name` can be a column of a table and a tag of a logger."""
    return isinstance(name, str) and re.fullmatch(r"[\w.@/-]+", name) is not None


def _named_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics as a dictionary. Raises `ConfigError` for names and values that cannot be used."""
    for name, metric in metrics.items():
        if not _is_name(name):
            raise ConfigError(f"a metric is called {name!r}: {_NAMES}.")
        if name == "loss":
            raise ConfigError("a metric is called loss, as the validation loss is: give it another name.")
        if not callable(metric):
            raise ConfigError(f"the metric {name} is {metric!r}: give a function of output and targets.")
    return dict(metrics)


def _require_own_names(validation: Validation, run: TrainingLoop) -> None:
    """Raise `ConfigError` where a validation before `validation` writes a number of the same name."""
    for other in run.callbacks:
        if other is validation:
            return
        shared = set(validation.names()) & set(other.names() if isinstance(other, Validation) else ())
        if shared:
            raise ConfigError(
                f"two validations write {min(shared)} into the row of a step: give each a name of its own, "
                "as Validation(…, name='test') or fit(validation={'test': …})."
            )
