"""What `step.json` holds: one recorded step of all ranks, with actions, blocked time, and traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from plait.report.description import damaged

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
    (folder / STEP_FILE).write_bytes(_adapter().dump_json(step))


def read_step(folder: Path) -> RecordedStep | None:
    """Return what `step.json` holds, or None without one. Raises `DataError` for a damaged file."""
    path = folder / STEP_FILE
    if not path.is_file():
        return None
    try:
        return _adapter().validate_json(path.read_bytes())
    except (ValidationError, ValueError) as error:
        raise damaged(path, error) from None
