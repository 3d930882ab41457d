"""`RunRecord`: the content of all files that a run wrote to its folder; events, written as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from plait.errors import ConfigError
from plait.files import adapter_of, open_to_write, validated
from plait.pictures.report.expert_loads import ExpertLoads, read_expert_loads
from plait.pictures.report.metrics import Metrics, RankSeries, lines_of, read_metrics, read_rank_series
from plait.pictures.report.run_json import RunDescription, read_description, read_json_file
from plait.pictures.report.step_json import RecordedStep, read_step

METRICS_FILE, EVENTS_FILE = "metrics.jsonl", "events.jsonl"
EventKind = Literal["start", "warning", "sample", "resized", "finished", "stopped", "failed"]
ENDS: tuple[EventKind, ...] = ("finished", "stopped", "failed")
_STILL = 120.0
"""Seconds since the last metrics after which a run without an end counts as one that died."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run (start, warning, sample, …), after `step` finished steps."""

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


@dataclass(frozen=True)
class RunRecord:
    """A training run, from the files in its folder; only the metrics are always there."""

    name: str
    metrics: Metrics
    config: Mapping[str, Any]
    """The configuration by section and field; empty where there is no `config.json`."""
    description: RunDescription | None
    events: tuple[RunEvent, ...]
    step: RecordedStep | None
    ranks: RankSeries | None
    experts: ExpertLoads | None
    age: float
    """Seconds since the metrics were written."""

    @property
    def end(self) -> RunEvent | None:
        """The event that ended the run; None while it runs, and where it died without one."""
        latest = next((event for event in reversed(self.events) if event.kind in (*ENDS, "start")), None)
        return latest if latest is not None and latest.kind in ENDS else None

    @property
    def resumptions(self) -> tuple[int, ...]:
        """The steps after which the run was resumed from a checkpoint, ascending."""
        return tuple(sorted({event.step for event in self.events if event.kind == "start" and event.step}))

    @property
    def counted(self) -> str:
        """What `tokens` counts: "rows" if each step's number equals its batch's rows, else "tokens"."""
        rows = None if self.description is None else self.description.rows
        return "rows" if rows and set(self.metrics.numbers("tokens")) == {rows} else "tokens"

    @property
    def died(self) -> bool:
        """Whether the run began and did not end, but writes no more files."""
        return bool(self.events) and self.end is None and self.age >= _STILL

    @property
    def state(self) -> str:
        """Whether the run finished, was stopped, failed, runs or died, as a sentence without a full stop."""
        step, planned = self.metrics.steps[-1], self.config_field("train.steps")
        of = f"{step:,} of {planned:,}" if isinstance(planned, int) else f"{step:,}"
        if self.end is not None:
            return f"{self.end.kind.capitalize()} after step {of}"
        if self.died:
            return f"Ended without saying why, after step {of}"
        if self.events:
            return f"Running: step {of}"
        return f"Finished after step {of}" if planned == step else f"{of} steps"

    def config_field(self, name: str) -> Any:
        """Return the value of a field of the configuration, such as `train.lr`; None where it has none."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield each field of the configuration by its dotted name, such as `train.lr`, with its value."""
        return _flat("", self.config)


def read_run(path: Path) -> RunRecord:
    """Return the run in the folder or file `path`. ConfigError where there is none, DataError if damaged."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a run (its run.dir).")
    metrics = path if path.is_file() else path / METRICS_FILE
    if not metrics.exists():
        raise ConfigError(
            f"{path} has no {METRICS_FILE}: give the folder of a run (its run.dir) that has done a step."
        )
    folder = metrics.parent
    return RunRecord(
        name=folder.resolve().name if metrics.name == METRICS_FILE else metrics.stem,
        metrics=read_metrics(metrics),
        config=read_json_file(dict[str, Any], folder / "config.json") or {},
        description=read_description(folder),
        events=read_events(folder),
        step=read_step(folder),
        ranks=read_rank_series(folder),
        experts=read_expert_loads(folder),
        age=time.time() - metrics.stat().st_mtime,
    )


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
