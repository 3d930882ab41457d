"""Loggers of other packages, TensorBoard, Weights & Biases, MLflow, and those of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.app.loop import loggers
from plait.app.loop.loggers import Csv, JsonLines, Logger, MetricsRow, free_name
from plait.errors import ConfigError, missing_package
from plait.files import make_folder
from plait.pictures.report.run_record import METRICS_FILE

Writer = tuple[Callable[..., object], Callable[[], object]]
"""`send(numbers, step=…)`, and a function that ends the writer."""


class _Service:
    """Base class: sends each row to a writer, which `_start` makes when the run begins."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._writer: Writer | None = None

    def begin(self, steps: int) -> None:
        """Start the writer. Raises `ConfigError` where its package is not installed."""
        self._writer = self._start(steps)

    def write(self, row: MetricsRow) -> None:
        """Send the finite numbers of a step's row."""
        assert self._writer is not None
        numbers = {name: value for name, value in row.items() if value is not None}
        self._writer[0](numbers, step=int(numbers.pop("step", 0)))

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer[1]()

    def _start(self, steps: int) -> Writer:
        """Return a new writer; `steps`: the number of steps before a resumption."""
        raise NotImplementedError


class TensorBoard(_Service):
    """Logger that writes each number of a row to a TensorBoard log in a folder."""

    def __init__(self, folder: str | Path) -> None:
        """Logs of an earlier run in `folder` are moved to `folder/earlier.1`, unless this run resumes it."""
        super().__init__()
        self._folder = Path(folder)

    def _start(self, steps: int) -> Writer:
        writer_class = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        if not steps and (earlier := [*self._folder.glob("events.out.tfevents.*")]):
            kept = free_name(self._folder / "earlier")
            make_folder(kept)
            for old in earlier:
                old.rename(kept / old.name)
        writer = writer_class(str(self._folder), purge_step=steps + 1 if steps else None)

        def send(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return send, writer.close


class WeightsAndBiases(_Service):
    """Logger that sends each row to a run of Weights & Biases (the package `wandb`).

    Options go to `wandb.init`: project, name, id and resume of a run that goes on, mode, config …
    """

    def _start(self, steps: int) -> Writer:
        run = _imported("wandb", "wandb").init(**self._options)
        return run.log, run.finish


class MLflow(_Service):
    """Logger that sends each row to a run of MLflow (the package `mlflow`).

    Options go to `mlflow.start_run`: run_name, experiment_id, run_id of a run that goes on …
    """

    def _start(self, steps: int) -> Writer:
        mlflow = _imported("mlflow", "mlflow")
        mlflow.start_run(**self._options)
        return mlflow.log_metrics, mlflow.end_run


def _imported(module: str, package: str) -> Any:
    """Return a module of an optional package. Raises `ConfigError` where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        what = f"the logger {module}"
        raise ConfigError(f"{missing_package(what, package, package)}, or leave the logger out.") from None


FIELD = "run.dir"
"""The field of the configuration that names the folder."""
TABLE_FILE, TENSORBOARD_FOLDER = "metrics.csv", "tensorboard"


def loggers_of(folder: Path, *, csv_too: bool, tensorboard: bool) -> tuple[Logger, ...]:
    """Return the metrics' loggers of a run in `folder`, not yet opened.

    TensorBoard logs are written where `tensorboard` is true and it is installed.
    """
    made: list[Logger] = [JsonLines(folder / METRICS_FILE)]
    if csv_too:
        made.append(Csv(folder / TABLE_FILE))
    if tensorboard and find_spec("tensorboard") is not None:
        made.append(TensorBoard(folder / TENSORBOARD_FOLDER))
    return tuple(made)


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """Return the error for an unwritable folder of a run."""
    return loggers.unwritable(folder, error, FIELD)
