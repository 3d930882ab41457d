"""Events of a run, in `events.jsonl`: its start, warnings, and its end; each written as it happens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

EVENTS_FILE = "events.jsonl"
EventKind = Literal["start", "warning", "note", "sample", "finished", "stopped", "failed"]
ENDS: tuple[EventKind, ...] = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, after `step` finished steps."""

    kind: EventKind
    step: int
    text: str
    time: str
    """Date and time with its zone, as ISO 8601."""


def now() -> str:
    """Return the date and time, to seconds, as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def _adapter() -> TypeAdapter[RunEvent]:
    return TypeAdapter(RunEvent)


def write_event(folder: Path, kind: EventKind, step: int, text: str) -> None:
    """Append an event to the file in `folder`; where that fails the run goes on, and the event is lost."""
    line = _adapter().dump_json(RunEvent(kind, step, text, now())) + b"\n"
    with suppress(OSError), (folder / EVENTS_FILE).open("ab") as file:
        file.write(line)


def read_events(folder: Path) -> tuple[RunEvent, ...]:
    """Return the events in `folder`, in order; damaged lines are skipped."""
    path = folder / EVENTS_FILE
    events: list[RunEvent] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValidationError, ValueError):
            events.append(_adapter().validate_json(line))
    return tuple(events)
