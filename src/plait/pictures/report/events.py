"""Events of a run in `events.jsonl`, written as they happen: start, warnings and end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from plait.files import adapter_of, open_to_write, read_bytes, validated

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


def write_event(folder: Path, kind: EventKind, step: int, text: str) -> None:
    """Append an event to the file in `folder`; where that fails the run goes on, and the event is lost."""
    line = adapter_of(RunEvent).dump_json(RunEvent(kind, step, text, now())) + b"\n"
    with suppress(OSError), open_to_write(folder / EVENTS_FILE, append=True) as file:
        file.write(line)


def read_events(folder: Path) -> tuple[RunEvent, ...]:
    """Return the events in `folder`, in order; damaged lines are skipped."""
    events: list[RunEvent] = []
    for line in lines_of(folder / EVENTS_FILE):
        with suppress(ValueError):
            events.append(validated(RunEvent, line))
    return tuple(events)


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file of a run; none where it is missing, or no file that can be read."""
    try:
        return read_bytes(path).split(b"\n")
    except OSError:
        return []
