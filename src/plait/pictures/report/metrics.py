"""Metrics of a run as columns, from `metrics.jsonl`, and series of each rank, from `ranks.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from plait.errors import DataError
from plait.files import json_value, read_bytes, read_text, validated

MOST = 1e300
"""Numbers are smaller than this: sums and squares of larger ones are infinite."""
Number = float | None
"""A number of a row; None where it is missing or was not finite."""
RANKS_FILE = "ranks.jsonl"
EXPERTS_FILE = "experts.jsonl"


@dataclass(frozen=True)
class Metrics:
    """The rows of `metrics.jsonl` as columns of equal length, by key."""

    columns: Mapping[str, tuple[Number, ...]]
    damaged: int = 0
    """Lines that could not be read, such as the last one of a run that was killed."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The step number of each row, counted from 1."""
        return tuple(int(step or 0) for step in self.columns.get("step", ()))

    def numbers(self, key: str) -> list[float]:
        """Return the numbers of a column, without missing ones."""
        return [number for number in self.columns.get(key, ()) if number is not None]

    def last(self, key: str) -> Number:
        """Return the latest number that a column of metrics has; None if it has none."""
        return next(reversed(self.numbers(key)), None)

    def at_last(self, key: str) -> tuple[int, float] | None:
        """Return the step and the value of the last number of a column, or None."""
        found = zip(self.steps, self.columns.get(key, ()), strict=False)
        return next(((step, value) for step, value in reversed([*found]) if value is not None), None)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all steps together."""
        return int(sum(self.numbers("tokens")))

    def thinned(self, most: int) -> Metrics:
        """Return metrics of about `most` steps: in each range of steps, those of lowest and highest loss.

        Steps with a number that most steps lack, such as a validation loss, stay; so do the first and last.
        """
        count = len(self.steps)
        if count <= most:
            return self
        kept = {0, count - 1}
        for values in self.columns.values():
            present = [row for row, value in enumerate(values) if value is not None]
            if len(present) < min(count / 4, most / 4):
                kept.update(present)
        losses = self.columns.get("loss") or self.columns["step"]

        def loss_of(row: int) -> float:
            return losses[row] or 0.0

        size = math.ceil(2 * count / max(most - len(kept), 2))
        for first in range(0, count, size):
            rows = [row for row in range(first, min(first + size, count)) if losses[row] is not None]
            if rows:
                kept.update((min(rows, key=loss_of), max(rows, key=loss_of)))
        order = sorted(kept)
        columns = {key: tuple(values[row] for row in order) for key, values in self.columns.items()}
        return Metrics(columns, self.damaged)


def read_metrics(path: Path) -> Metrics:
    """Return the metrics in a file of JSON lines. Raises `DataError` where it holds no row, or is no text."""
    rows: list[Mapping[str, Number]] = []
    damaged = 0
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} cannot be read ({why}): give the folder of a run of plait train.") from None
    for line in lines:
        row = _row(line)
        damaged += row is None and bool(line.strip())
        rows += [] if row is None else [row]
    if not rows:
        problem = "no line of it is a JSON object with a step" if damaged else "it is empty"
        raise DataError(f"{path} has no metrics ({problem}): wait for a step, or give another run.")
    keys = dict.fromkeys(key for row in rows for key in row)
    return Metrics({key: tuple(row.get(key) for row in rows) for key in keys}, damaged)


def _row(line: str) -> dict[str, Number] | None:
    """Return the numbers of a JSON line by key, or None where it is no object with a step."""
    try:
        read = json_value(line, strict=False)
    except ValueError:
        return None
    if not isinstance(read, dict) or not is_number(read.get("step")) or not 0 <= read["step"] < MOST:
        return None
    return {
        key: value if is_number(value) else None
        for key, value in read.items()
        if value is None or isinstance(value, float) or is_number(value)
    }


def is_number(value: object) -> bool:
    """Return whether `value` is an int or a float that is finite, and below `MOST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def buckets(count: int, most: int) -> Iterator[range]:
    """Yield at most `most` consecutive ranges of about equal size that cover `range(count)`."""
    parts = min(count, most)
    for part in range(parts):
        yield range(part * count // parts, (part + 1) * count // parts)


@dataclass(frozen=True)
class RankSeries:
    """For each step the numbers of all ranks: seconds blocked in communication, peak bytes so far."""

    steps: tuple[int, ...]
    blocked: tuple[tuple[float, ...], ...]
    memory: tuple[tuple[float, ...], ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.memory[-1])

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peak memory of each rank, in bytes."""
        return self.memory[-1]

    def busy(self, step_seconds: Sequence[float | None]) -> tuple[tuple[float, ...], ...] | None:
        """Return the seconds of each step in which each rank was not blocked; None where not measured."""
        if len(step_seconds) != len(self.steps) or not any(map(any, self.blocked)):
            return None
        return tuple(
            tuple(max(0.0, (seconds or 0.0) - one) for one in row)
            for seconds, row in zip(step_seconds, self.blocked, strict=True)
        )


def means_of_stretches(rows: Sequence[Sequence[float]], most: int) -> tuple[list[int], list[list[float]]]:
    """Divide rows into at most `most` ranges; return the index of each one's first row, and column means.

    The means are, for each column, those of its numbers in each range.
    """
    stretches = list(buckets(len(rows), most))
    columns = [*zip(*rows, strict=True)]
    means = [[fmean(column[rows.start : rows.stop]) for rows in stretches] for column in columns]
    return [stretch.start for stretch in stretches], means


def typical(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column over the second half of the rows."""
    return [median(column) for column in zip(*rows[len(rows) // 2 :], strict=True)]


def read_rank_series(folder: Path) -> RankSeries | None:
    """Return the numbers of each rank in `folder`; None if there are none. Skips damaged lines."""
    rows: list[_Row] = []
    for line in lines_of(folder / RANKS_FILE):
        with suppress(ValueError):
            row = validated(_Row, line)
            if all(0 <= number < MOST for number in (*row.blocked_seconds, *row.peak_memory_bytes)):
                rows.append(row)
    world = len(rows[-1].peak_memory_bytes) if rows else 0
    rows = [row for row in rows if len(row.blocked_seconds) == len(row.peak_memory_bytes) == world > 0]
    columns = ((row.step, row.blocked_seconds, row.peak_memory_bytes) for row in rows)
    return RankSeries(*zip(*columns, strict=True)) if rows else None


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file as bytes; none where it cannot be read."""
    try:
        return read_bytes(path).split(b"\n")
    except OSError:
        return []


@dataclass(frozen=True)
class _Row:
    step: int
    blocked_seconds: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]
