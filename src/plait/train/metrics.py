"""What is written down: `metrics.jsonl`, one object a step, and the same as CSV and TensorBoard logs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from plait.errors import ConfigError

Row = Mapping[str, float | None]
"""None: a number that is not finite."""

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


class Sink(Protocol):
    """A place that rows go to."""

    def begin(self, steps: int) -> None:
        """Open it, with the rows of the first `steps` steps that are there from before."""
        ...

    def write(self, row: Row) -> None:
        """Take one step's row."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Metrics:
    """All sinks of a run; a context manager. Without sinks (on ranks other than 0) it does nothing."""

    def __init__(self, sinks: tuple[Sink, ...] = (), folder: Path = Path()) -> None:
        self._sinks = sinks
        self._folder = folder
        self._told = False

    def begin(self, steps: int) -> None:
        """Before the first row: keep those of the `steps` steps that a resumed run has behind it."""
        try:
            for sink in self._sinks:
                sink.begin(steps)
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def write(self, row: Mapping[str, float]) -> str:
        """Write a step's row, whose keys are among `COLUMNS`, to every sink; none stands for inf and nan.

        A run does not end because a disk is full: rows wait, and are written with a later one. Gives a
        sentence about it, once; else nothing.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        flaw = ""
        for sink in self._sinks:
            try:
                sink.write(finite)
            except OSError as error:
                flaw = f"metrics cannot be written to {self._folder} ({error.strerror or error}): they wait."
        told, self._told = self._told, bool(flaw)
        return "" if told else flaw

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with ExitStack() as stack:  # closes each, whatever another one raises
                for sink in self._sinks:
                    stack.callback(sink.close)
        except OSError as failure:
            if error is None:  # else that one is the cause, and is told
                raise _unwritable(self._folder, failure) from None


def open_metrics(folder: Path, configuration: str, *, csv_too: bool, tensorboard: bool) -> Metrics:
    """Make the run's folder and write `config.json`; what was there of metrics stays until `begin`.

    `configuration` is JSON. TensorBoard logs are written where it is asked for and installed. Raises
    `ConfigError` when the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(configuration + "\n", encoding="utf-8")
        sinks: list[Sink] = [_Lines(folder / "metrics.jsonl")]
        table = folder / "metrics.csv"
        if csv_too:
            sinks.append(_Table(table))
        else:
            table.unlink(missing_ok=True)
        if tensorboard and find_spec("tensorboard") is not None:
            sinks.append(_TensorBoard(folder / "tensorboard"))
    except OSError as error:
        raise _unwritable(folder, error) from None
    return Metrics(tuple(sinks), folder)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir = {str(folder)!r} cannot be written to ({error.strerror}): choose another folder."
    )


class _Appended:
    """A file that text is added to; what there is no room for is tried again with the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, text: str) -> None:
        """OSError as long as not all of it, and of what came before, is written."""
        self._waiting += text.encode()
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        with self._file:
            self.add("")


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: _Appended | None = None

    def begin(self, steps: int) -> None:
        kept = [line for line in _lines_of(self._path, steps) if _step_of(line) <= steps]
        _replace(self._path, kept)
        self._file = _Appended(self._path)

    def write(self, row: Row) -> None:
        assert self._file is not None
        self._file.add(json.dumps(dict(row), allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Table:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: _Appended | None = None

    def begin(self, steps: int) -> None:
        lines = (line for line in _lines_of(self._path, steps) if line.partition(",")[0].isdigit())
        kept = [line for line in lines if int(line.partition(",")[0]) <= steps]
        _replace(self._path, [",".join(COLUMNS) + "\n", *kept])
        self._file = _Appended(self._path)

    def write(self, row: Row) -> None:
        assert self._file is not None
        line = io.StringIO()
        csv.DictWriter(line, COLUMNS, restval="", lineterminator="\n").writerow(row)
        self._file.add(line.getvalue())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines_of(path: Path, steps: int) -> list[str]:
    """The lines of an earlier run's file, but for one that was cut off; none where nothing is resumed."""
    if not steps or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _step_of(line: str) -> float:
    """Which step a line of JSON is of; a damaged one is of none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _replace(path: Path, lines: list[str]) -> None:
    """Write a file anew, which is there as before until all of it is written."""
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
    unfinished.replace(path)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self._folder.glob("events.out.tfevents.*") if not steps else ():
            old.unlink()
        self._writer = SummaryWriter(str(self._folder), purge_step=steps + 1 if steps else None)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, int(row["step"] or 0))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
