"""Metrics output of a run: `metrics.jsonl`, one object per step, and the same as CSV and TensorBoard logs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from plait.errors import ConfigError
from plait.loop import loggers
from plait.loop.loggers import Csv, JsonLines, Logger
from plait.loop.tracking_services import TensorBoard

FIELD = "run.dir"
"""The field of the configuration that names the folder."""


def open_loggers(folder: Path, configuration: str, *, csv_too: bool, tensorboard: bool) -> tuple[Logger, ...]:
    """Create the run's folder, write `config.json`, and return the metrics' loggers, not yet opened.

    Metrics of an earlier run in the folder stay until the loggers begin.

    `configuration` is JSON. TensorBoard logs are written where `tensorboard` is true and it is installed.
    Raises `ConfigError` when the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(configuration + "\n", encoding="utf-8")
        opened: list[Logger] = [JsonLines(folder / "metrics.jsonl")]
        table = folder / "metrics.csv"
        if csv_too:
            opened.append(Csv(table))
        else:
            table.unlink(missing_ok=True)
        if tensorboard and find_spec("tensorboard") is not None:
            opened.append(TensorBoard(folder / "tensorboard"))
    except OSError as error:
        raise unwritable(folder, error) from None
    return tuple(opened)


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """Return the error for an unwritable folder of a run."""
    return loggers.unwritable(folder, error, FIELD)
