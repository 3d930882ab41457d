"""Series of each rank over the steps of a run, in `ranks.jsonl`: blocked time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median

from pydantic import TypeAdapter

from plait.files import validated
from plait.pictures.report.events import lines_of
from plait.pictures.report.metrics import MOST, buckets

RANKS_FILE = "ranks.jsonl"


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
        """Return for each step the seconds in which each rank was not blocked; None where not measured.

        `step_seconds`: of the same steps.
        """
        if len(step_seconds) != len(self.steps) or not any(map(any, self.blocked)):
            return None
        return tuple(
            tuple(max(0.0, (seconds or 0.0) - one) for one in row)
            for seconds, row in zip(step_seconds, self.blocked, strict=True)
        )


def means_of_stretches(rows: Sequence[Sequence[float]], most: int) -> tuple[list[int], list[list[float]]]:
    """Return the first row of each of at most `most` stretches, and each column's means over stretches."""
    stretches = list(buckets(len(rows), most))
    columns = [*zip(*rows, strict=True)]
    means = [[fmean(column[rows.start : rows.stop]) for rows in stretches] for column in columns]
    return [stretch.start for stretch in stretches], means


def typical(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column over the later half of the rows."""
    return [median(column) for column in zip(*rows[len(rows) // 2 :], strict=True)]


def read_rank_series(folder: Path) -> RankSeries | None:
    """Return the numbers of each rank in `folder`; None if there are none. Skips damaged lines."""
    rows: list[_Row] = []
    for line in lines_of(folder / RANKS_FILE):
        with suppress(ValueError):
            row = validated(_adapter(), line)
            if all(0 <= number < MOST for number in (*row.blocked_seconds, *row.peak_memory_bytes)):
                rows.append(row)
    world = len(rows[-1].peak_memory_bytes) if rows else 0
    rows = [row for row in rows if len(row.blocked_seconds) == len(row.peak_memory_bytes) == world > 0]
    columns = ((row.step, row.blocked_seconds, row.peak_memory_bytes) for row in rows)
    return RankSeries(*zip(*columns, strict=True)) if rows else None


@dataclass(frozen=True)
class _Row:
    step: int
    blocked_seconds: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]


@cache
def _adapter() -> TypeAdapter[_Row]:
    return TypeAdapter(_Row)
