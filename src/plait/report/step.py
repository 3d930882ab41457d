"""What `step.json` holds: one recorded step of all ranks, with actions, blocked time, and traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from plait.files import write_bytes
from plait.report.description import read_file

STEP_FILE = "step.json"

RecordedAction = tuple[int, str, int, int, int]
"""Stage, kind, micro-batch, start and end in nanoseconds of the clock of rank 0."""
BlockedSpan = tuple[str, int, int]
"""The axis, start and end in nanoseconds of a wait for communication."""


@dataclass(frozen=True)
class RecordedRank:
    """A recorded step of one rank."""

    actions: tuple[RecordedAction, ...]
    blocked: tuple[BlockedSpan, ...]
    traffic: Mapping[str, Mapping[str, tuple[int, int]]]
    """Calls and payload bytes of each kind of operation, by axis."""


@dataclass(frozen=True)
class RecordedStep:
    """The content of `step.json`."""

    step: int
    """Counted from 1."""
    policy: str
    microbatches: int
    stage_ranks: tuple[int, ...]
    ranks: tuple[RecordedRank, ...]
    """All ranks of the world, in order."""


@cache
def _adapter() -> TypeAdapter[RecordedStep]:
    return TypeAdapter(RecordedStep)


@cache
def _rank_adapter() -> TypeAdapter[RecordedRank]:
    return TypeAdapter(RecordedRank)


def rank_as_text(rank: RecordedRank) -> str:
    """Return what a rank recorded as JSON, to be sent to another rank."""
    return _rank_adapter().dump_json(rank).decode()


def rank_from_text(text: str) -> RecordedRank:
    """Return what a rank has sent."""
    return _rank_adapter().validate_json(text)


def write_step(step: RecordedStep, folder: Path) -> None:
    """Write `step.json` in `folder`. Raises `OSError`."""
    write_bytes(folder / STEP_FILE, _adapter().dump_json(step))


def read_step(folder: Path) -> RecordedStep | None:
    """Return what `step.json` holds, or None without one. Raises `DataError` for a damaged file."""
    return read_file(_adapter(), folder / STEP_FILE)
