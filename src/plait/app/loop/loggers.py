"""Loggers: each step's numbers as JSON lines and CSV, to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from plait.errors import ConfigError, missing_package
from plait.files import json_value, make_folder, open_to_write, read_bytes, write_bytes
from plait.plan.argument_checks import require_path

MetricsRow = Mapping[str, float | None]
"""The metrics of one step; non-finite numbers are None."""

COLUMNS = (
    "step",  # counted from 1
    "loss",  # mean over the tokens of the step's global batch
    "grad_norm",  # over all parameters of the mesh, before clipping
    "lr",
    "tokens",  # in this step's sequences, of all ranks together
    "trained_tokens",  # those of them whose loss counts
    "step_seconds",
    "data_seconds",  # within them, until the batch was there: of the rank that waited longest
    "tokens_per_second",
    "peak_memory_bytes",  # so far, of the rank that had most
    "mfu",  # model FLOPs utilisation, where the device's peak is known
    "validation_loss",  # on the steps that end with a validation
)


class Logger(Protocol):
    """Writes rows of metrics somewhere. Only rank 0 calls its methods."""

    def begin(self, steps: int) -> None:
        """Open the file or service; keep the rows of the first `steps` steps, written before a resumption."""

    def write(self, row: MetricsRow) -> None:
        """Write a step's row of metrics. Raises OSError if that failed; a later call writes it, too."""

    def close(self) -> None:
        """Write rows that could not be written before, and close the file or service."""


class LoggerGroup:
    """Writes rows to several loggers; a write that fails, as on a full disk, is a warning and no error."""

    def __init__(self, loggers: Sequence[Logger] = (), folder: Path = Path(), field: str = "") -> None:
        """`folder` and its `field` of the configuration name the place in messages."""
        self._loggers, self._folder, self._field = tuple(loggers), folder, field
        self._failed = False

    def begin(self, steps: int) -> None:
        """Open all loggers; keep the rows of the first `steps` steps, written before a resumption."""
        try:
            for logger in self._loggers:
                logger.begin(steps)
        except OSError as error:
            raise unwritable(self._folder, error, self._field) from None

    def write(self, row: Mapping[str, Any]) -> str:
        """Write a step's row to all loggers; return a warning if that starts to fail, else "".

        Returns a warning when writing starts to fail, else "": rows are kept, and written with a later one.
        """
        finite = finite_values(row)
        failure = ""
        for logger in self._loggers:
            try:
                logger.write(finite)
            except OSError as error:
                reason = error.strerror or error
                failure = f"metrics cannot be written to {self._folder} ({reason}): retried every step."
        failed_before, self._failed = self._failed, bool(failure)
        return "" if failed_before else failure

    def close(self, error: BaseException | None = None) -> None:
        """Close every logger. Raises `ConfigError` where that fails, unless `error` is the cause."""
        try:
            with ExitStack() as stack:  # closes every logger, also where closing another raises
                for logger in self._loggers:
                    stack.callback(logger.close)
        except OSError as failure:
            if error is None:  # else `error` is the cause, and is raised
                raise unwritable(self._folder, failure, self._field) from None


def finite_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row of metrics for JSON, with None in place of non-finite numbers."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def unwritable(folder: Path, error: OSError, field: str = "") -> ConfigError:
    """Return the error for a run's folder that cannot be written; `field`: its configuration field."""
    place = f"{field} = {str(folder)!r}" if field else str(error.filename or folder)
    inner = error.filename if field and error.filename not in (None, str(folder)) else None
    reason = f"{inner}: {error.strerror}" if inner else error.strerror
    return ConfigError(f"{place} cannot be written to ({reason}): choose another folder.")


def free_name(path: Path) -> Path:
    """Return the first of `metrics.1.jsonl`, `metrics.2.jsonl`, … beside `path` that is free."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


class _TextFile:
    """A text file with one line per step. Lines rejected by a full disk are retried with the next."""

    def __init__(
        self,
        path: str | Path,
        header: str,
        step_of: Callable[[str], float],
        line_of: Callable[[Mapping[str, Any]], str],
    ) -> None:
        require_path("a logger's path", path)
        self._path, self._header, self._step_of, self._line_of = Path(path), header, step_of, line_of
        self._file: BinaryIO | None = None
        self._unwritten = b""

    def begin(self, steps: int) -> None:
        """Create the file anew, with the earlier file's lines of the first `steps` steps.

        Without any, a file of an earlier run is renamed: `metrics.1.jsonl`.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not steps and self._path.is_file() and self._path.stat().st_size:
            self._path.rename(free_name(self._path))
        lines = [self._header]
        if steps and os.path.lexists(self._path):
            earlier = self._read().splitlines(keepends=True)
            whole = [line for line in earlier if line.endswith("\n")]
            lines += [line for line in whole if self._step_of(line) <= steps]
        self._open_with(lines)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line with the step's row of metrics."""
        self._append(self._line_of(row))

    def close(self) -> None:
        """Append lines that a full disk had rejected, and close the file."""
        if self._file is not None:
            with self._file:
                self._append("")

    def _open_with(self, lines: Sequence[str]) -> None:
        """Replace the file by one with these lines, and open it."""
        unfinished = self._path.with_name(f"{self._path.name}.part")
        write_bytes(unfinished, "".join(lines).encode(), synchronised=True)
        unfinished.replace(self._path)  # a link itself, not what it leads to
        self._file = open_to_write(self._path, append=True)

    def _read(self) -> str:
        return read_bytes(self._path).decode(errors="replace")

    def _append(self, text: str) -> None:
        """Append earlier unwritten text, then `text`. Raises OSError while some text remains unwritten."""
        assert self._file is not None
        self._unwritten += text.encode()
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


class JsonLines(_TextFile):
    """Logger that appends one JSON object per step to a file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "", _json_step, lambda row: json.dumps(dict(row), allow_nan=False) + "\n")


class Csv(_TextFile):
    """Logger that appends one line per step to a CSV file."""

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        """Write `columns`, of which "step" is the first, and leave other numbers out.

        None: `COLUMNS`, and a further column for each other number, from the row on in which it comes first.
        """
        is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
        if columns is not None and not (is_list and [*columns][:1] == ["step"]):
            raise ConfigError(
                f"Csv's columns are {columns!r}: give a list of names, of which step is the first."
            )
        self._grows, self._columns = columns is None, list(COLUMNS if columns is None else columns)
        super().__init__(path, self._titles(), _csv_step, self._line)

    def begin(self, steps: int) -> None:
        """Create the file anew, with the earlier file's columns, and its lines of the first `steps` steps.

        Raises `ConfigError` where the earlier columns are not those that were given.
        """
        if steps and self._path.exists():
            earlier = self._read().partition("\n")[0].split(",")
            if self._grows and earlier[: len(COLUMNS)] == list(COLUMNS):
                self._columns, self._header = earlier, f"{','.join(earlier)}\n"
            elif earlier[:1] == ["step"] and earlier != self._columns:
                raise ConfigError(
                    f"{self._path} has the columns {', '.join(earlier)}, and Csv is to go on with "
                    f"{', '.join(self._columns)}: give the same columns, or another path."
                )
        super().begin(steps)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line with the step's row of metrics."""
        others = [name for name in row if name not in self._columns]
        if others and self._grows and not self._unwritten:
            self._add_columns(others)
        super().write(row)

    def _add_columns(self, names: Sequence[str]) -> None:
        """Write the file anew, with further columns that are empty in the lines of earlier steps."""
        self.close()
        self._columns += names
        before = self._read().splitlines()[1:]
        self._open_with([self._titles(), *(f"{line}{',' * len(names)}\n" for line in before)])

    def _titles(self) -> str:
        return ",".join(self._columns) + "\n"

    def _line(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writerow(row)
        return text.getvalue()


def _json_step(line: str) -> float:
    """Return the training step of a JSON line; infinity for a damaged line."""
    try:
        return float(json_value(line, strict=False)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf


def _csv_step(line: str) -> float:
    """Return the training step of a CSV line; infinity for the header and for a damaged line."""
    step = line.partition(",")[0]
    return int(step) if step.isdigit() else math.inf


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
