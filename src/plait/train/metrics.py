"""Metrics output: `metrics.jsonl`, one object per step, and the same as CSV and TensorBoard logs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from plait.errors import ConfigError

MetricsRow = Mapping[str, float | None]
"""The metrics of one step; non-finite numbers are None."""

COLUMNS = (
    "step",  # counted from 1
    "loss",  # mean over the tokens of the step's global batch
    "grad_norm",  # over all parameters of the mesh, before clipping
    "lr",
    "tokens",  # trained on in this step, by all ranks together
    "step_seconds",
    "tokens_per_second",
    "peak_memory_bytes",  # so far, of the rank that had most
    "mfu",  # model FLOPs utilisation, where the device's peak is known
    "validation_loss",  # on the steps that end with a validation
)


class Metrics:
    """Writes the metrics of a run to files and logs; on ranks other than 0 nothing. A context manager."""

    def __init__(self, sinks: tuple[MetricsSink, ...] = (), folder: Path = Path()) -> None:
        self._sinks = sinks
        self._folder = folder
        self._failed = False

    def begin(self, steps: int) -> None:
        """Open all files and logs; keep the rows of the first `steps` steps, written before a resumption."""
        try:
            for sink in self._sinks:
                sink.begin(steps)
        except OSError as error:
            raise unwritable(self._folder, error) from None

    def write(self, row: Mapping[str, float]) -> str:
        """Write the row of a step, with keys from `COLUMNS`, to all files and logs; return a warning or "".

        A full disk does not end a run: rows are kept, and written with a later one. Returns a warning when
        writing starts to fail, else "".
        """
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        failure = ""
        for sink in self._sinks:
            try:
                sink.write(finite)
            except OSError as error:
                reason = error.strerror or error
                failure = f"metrics cannot be written to {self._folder} ({reason}): retried every step."
        failed_before, self._failed = self._failed, bool(failure)
        return "" if failed_before else failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with ExitStack() as stack:  # closes every sink, also where closing another raises
                for sink in self._sinks:
                    stack.callback(sink.close)
        except OSError as failure:
            if error is None:  # else `error` is the cause, and is raised
                raise unwritable(self._folder, failure) from None


def open_metrics(folder: Path, configuration: str, *, csv_too: bool, tensorboard: bool) -> Metrics:
    """Create the run's folder, write `config.json`, and return the metrics' writers, not yet opened.

    Metrics of an earlier run in the folder stay until `Metrics.begin`.

    `configuration` is JSON. TensorBoard logs are written where `tensorboard` is true and it is installed.
    Raises `ConfigError` when the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(configuration + "\n", encoding="utf-8")
        sinks: list[MetricsSink] = [_FileSink(folder / "metrics.jsonl", "", _json_step, _json_line)]
        table = folder / "metrics.csv"
        if csv_too:
            sinks.append(_FileSink(table, ",".join(COLUMNS) + "\n", _csv_step, _csv_line))
        else:
            table.unlink(missing_ok=True)
        if tensorboard and find_spec("tensorboard") is not None:
            sinks.append(_TensorBoard(folder / "tensorboard"))
    except OSError as error:
        raise unwritable(folder, error) from None
    return Metrics(tuple(sinks), folder)


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """Return the error for an unwritable folder of a run."""
    return ConfigError(
        f"run.dir = {str(folder)!r} cannot be written to ({error.strerror}): choose another folder."
    )


@dataclass
class _FileSink:
    """Appends one line per step to a text file. Lines rejected by a full disk are retried with the next."""

    path: Path
    header: str
    step_of: Callable[[str], float]
    line_of: Callable[[MetricsRow], str]
    file: io.FileIO | None = None
    unwritten: bytes = b""

    def begin(self, steps: int) -> None:
        lines = [self.header]
        if steps and self.path.exists():
            earlier = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            whole = [line for line in earlier if line.endswith("\n")]
            lines += [line for line in whole if self.step_of(line) <= steps]
        unfinished = self.path.with_name(f"{self.path.name}.part")
        unfinished.write_text("".join(lines), encoding="utf-8", newline="")
        unfinished.replace(self.path)
        self.file = self.path.open("ab", buffering=0)

    def write(self, row: MetricsRow) -> None:
        self._append(self.line_of(row))

    def close(self) -> None:
        if self.file is not None:
            with self.file:
                self._append("")

    def _append(self, text: str) -> None:
        """Append earlier unwritten text, then `text`. Raises OSError while some text remains unwritten."""
        assert self.file is not None
        self.unwritten += text.encode()
        while self.unwritten:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]


def _json_line(row: MetricsRow) -> str:
    return json.dumps(dict(row), allow_nan=False) + "\n"


def _json_step(line: str) -> float:
    """Return the training step of a line of `metrics.jsonl`; infinity for a damaged line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _csv_line(row: MetricsRow) -> str:
    line = io.StringIO()
    csv.DictWriter(line, COLUMNS, restval="", lineterminator="\n").writerow(row)
    return line.getvalue()


def _csv_step(line: str) -> float:
    """Return the training step of a line of `metrics.csv`; infinity for the header and for a damaged line."""
    step = line.partition(",")[0]
    return int(step) if step.isdigit() else math.inf


class _TensorBoard:
    """Writes each number of a row to a TensorBoard log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self._folder.glob("events.out.tfevents.*") if not steps else ():
            old.unlink()
        self._writer = SummaryWriter(str(self._folder), purge_step=steps + 1 if steps else None)

    def write(self, row: MetricsRow) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, int(row["step"] or 0))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


MetricsSink = _FileSink | _TensorBoard
"""A file or log, opened by `begin`, that rows are written to."""
