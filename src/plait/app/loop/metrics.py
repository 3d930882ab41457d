"""Metrics output of a run: `metrics.jsonl`, one object per step, and the same as CSV and TensorBoard logs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from plait.app.loop import loggers
from plait.app.loop.loggers import Csv, JsonLines, Logger
from plait.app.loop.tracking_services import TensorBoard
from plait.errors import ConfigError
from plait.pictures.report.run_record import METRICS_FILE

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
