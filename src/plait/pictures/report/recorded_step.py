"""What `step.json` holds: one recorded step of all ranks, with actions, blocked time, and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from plait.files import write_bytes
from plait.pictures.report.run_description import Count, read_file

STEP_FILE = "step.json"

RecordedAction = tuple[Count, Annotated[str, Field(pattern="^[FIWB]$")], Count, Count, Count]
"""Stage, kind, micro-batch, start and end in nanoseconds of the clock of rank 0."""
BlockedSpan = tuple[str, Count, Count]
"""The axis, start and end in nanoseconds of a wait for communication."""


@dataclass(frozen=True)
class RecordedRank:
    """A recorded step of one rank."""

    actions: tuple[RecordedAction, ...]
    blocked: tuple[BlockedSpan, ...]
    traffic: Mapping[str, Mapping[str, tuple[Count, Count]]]
    """Calls and payload bytes of each kind of operation, by axis."""


@dataclass(frozen=True)
class RecordedStep:
    """The content of `step.json`."""

    step: Count
    """Counted from 1."""
    policy: str
    microbatches: Count
    stage_ranks: tuple[Count, ...]
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
    return read_file(_adapter(), folder / STEP_FILE, _contradictions)


def _contradictions(step: RecordedStep) -> Iterator[str]:
    """Yield what does not fit together in a recorded step."""
    pipeline = max(step.stage_ranks, default=-1) + 1
    if not step.ranks or not pipeline or len(step.ranks) % pipeline:
        yield "ranks: they are no whole pipelines of the ranks in stage_ranks"
    for number, rank in enumerate(step.ranks):
        if any(stage >= len(step.stage_ranks) or start > end for stage, _, _, start, end in rank.actions):
            yield f"ranks.{number}.actions: one is of no stage, or ends before it starts"
        if any(start > end for _, start, end in rank.blocked):
            yield f"ranks.{number}.blocked: a wait ends before it starts"
