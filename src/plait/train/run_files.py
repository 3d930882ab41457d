"""`RunFiles`: the callback that writes `run.json`, `events.jsonl`, `ranks.jsonl` and the report of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.loop.loggers import JsonLines, LoggerGroup
from plait.loop.training import Callback, TrainingLoop
from plait.report.description import RunDescription, write_description
from plait.report.events import EVENTS_FILE, write_event
from plait.report.rank_series import RANKS_FILE
from plait.report.step import STEP_FILE
from plait.report.writing import REPORT_FILE, write_report
from plait.train.config import Config
from plait.train.metrics import FIELD

_WARNING = "WARNING: "
_MOST_NUMBERS = 1_000_000
"""Numbers of all ranks and steps that are written; of larger runs only every so many steps."""


class RunFiles(Callback):
    """Writes on rank 0 what a report needs beside the metrics; does nothing on other ranks."""

    def __init__(self, config: Config, rank: int, tell: Callable[[str], None]) -> None:
        """`tell` shows a line to the user; `self.tell` also writes it down where it is a warning."""
        self._folder, self._reports, self._show = config.run.dir, config.run.report, tell
        self._starts_over = config.run.resume == "no"
        self._writes, self._step = rank == 0, 0
        self._every = max(1, config.train.steps * config.plan().world // _MOST_NUMBERS)
        self._series = LoggerGroup([JsonLines(self._folder / RANKS_FILE)], self._folder, FIELD)

    def describe(self, description: RunDescription) -> None:
        """Write `run.json`; remove what an earlier run has left, unless this one resumes it."""
        for name in (EVENTS_FILE, STEP_FILE, REPORT_FILE) if self._starts_over else ():
            (self._folder / name).unlink(missing_ok=True)
        write_description(description, self._folder)

    def tell(self, line: str) -> None:
        """Show a line, and add it to the events if it is a warning."""
        self._show(line)
        if self._writes and line.startswith(_WARNING):
            write_event(self._folder, "warning", self._step, line.removeprefix(_WARNING))

    def begin(self, run: TrainingLoop) -> None:
        """Start the files, and listen to what the run tells; rows after a resumption are dropped."""
        if run.tell != self.tell:  # the progress bar has its own way to show lines
            self._show, run.tell = run.tell, self.tell
        self._step = run.done
        if self._writes:
            self._series.begin(run.resumed_steps)
            write_event(self._folder, "start", run.resumed_steps, "")

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Write the numbers of each rank."""
        self._step = int(row["step"])
        if not self._writes or run.numbers is None or (self._step - 1) % self._every:
            return
        series: dict[str, Any] = {
            "step": self._step,
            "blocked_seconds": [round(seconds, 6) for seconds in run.numbers.blocked_seconds],
            "peak_memory_bytes": list(run.numbers.peak_memory),
        }
        if failure := self._series.write(series):
            self.tell(f"{_WARNING}{failure}")

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Write how the run ended, and its report, unless `run.report` is false."""
        if not self._writes:
            return
        self._series.close(error)
        if error is not None:
            write_event(self._folder, "failed", run.done, str(error) or type(error).__name__)
        elif run.stopped > 0:
            write_event(self._folder, "stopped", run.done, "")
        else:
            write_event(self._folder, "finished", run.done, "")
        if self._reports:
            self._report(self._folder)

    def _report(self, folder: Path) -> None:
        """Write the report; where that is impossible, the run goes on with a warning."""
        try:
            write_report([folder])
        except (PlaitError, OSError) as error:
            self._show(f"{_WARNING}the report could not be written: {error}")
