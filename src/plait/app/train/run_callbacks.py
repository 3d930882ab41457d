"""Callbacks of `plait train`: its folder, traces and reordered schedules, the numbers of the first steps."""

from __future__ import annotations

from contextlib import ExitStack

from plait.app.config.config import Config
from plait.app.loop.run_folder import EARLIER, REPORT_FILES, set_aside, set_aside_line
from plait.app.loop.tracking_services import TABLE_FILE, TENSORBOARD_FOLDER, unwritable
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.train.measured_schedules import (
    SCHEDULE_FILE,
    TRACE_FILES,
    reorder,
    write_schedule,
    write_trace,
)
from plait.app.train.reference_steps import LossAndNorm
from plait.app.train.run_checkpoints import FOLDER
from plait.app.train.trainer import Trainer
from plait.engine.recorder import Recording
from plait.files import write_bytes
from plait.pictures.report.events import write_event

CONFIG_FILE = "config.json"
FILES = (
    *REPORT_FILES,
    CONFIG_FILE,
    TABLE_FILE,
    TENSORBOARD_FOLDER,
    SCHEDULE_FILE,
    *TRACE_FILES.values(),
)
"""What a run leaves in `run.dir`, except checkpoints and prepared data."""
WRITTEN = (*FILES, EARLIER, FOLDER)
"""All files and folders in `run.dir` that a run writes."""


class RunFolder(Callback):
    """Archives an earlier run's files in `run.dir`, if this run starts over, and writes `config.json`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def begin(self, run: TrainingLoop) -> None:
        """Archive the earlier run's files and write `config.json`, on rank 0. ConfigError if impossible."""
        folder = self._config.run.dir
        if run.mesh.rank:
            return
        try:
            kept = None if run.resumed_steps else set_aside(folder, FILES)
            if not self._config.run.csv:
                (folder / TABLE_FILE).unlink(missing_ok=True)
            text = self._config.model_dump_json(indent=2)
            write_bytes(folder / CONFIG_FILE, f"{text}\n".encode())
        except OSError as error:
            raise unwritable(folder, error) from None
        if kept is not None:
            run.tell(set_aside_line(kept))


class Recordings(Callback):
    """Records the steps that `run.trace` draws and that `parallel.reorder` measures."""

    def __init__(self, config: Config) -> None:
        self._folder = config.run.dir
        self._trace, self._reorder = config.run.trace, config.parallel.reorder
        self._recording: Recording | None = None
        self._stack = ExitStack()

    def begin(self, run: TrainingLoop) -> None:
        """Write the schedule of the first step."""
        write_schedule(run.engine, self._folder, run.mesh)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is recorded."""
        return step in (self._trace, self._reorder)

    def before_step(self, run: TrainingLoop) -> None:
        """Start the recording of this step if it is to be recorded."""
        if self.is_due(run.done + 1):
            self._recording = self._stack.enter_context(run.engine.recording())

    def after_step(self, run: TrainingLoop) -> None:
        """Write the trace of the recorded step, and search a shorter schedule by its times."""
        self._stack.close()
        recording, self._recording = self._recording, None
        if recording is not None and run.done == self._trace:
            run.tell(write_trace(recording, run.done, self._folder, run.mesh))
        if recording is not None and run.done == self._reorder:
            run.tell(reorder(run.engine, recording, run.done, self._folder, run.mesh))


class Samples(Callback):
    """Prints a sample every `train.sample_every` steps; writes each, also the last one, for the report."""

    def __init__(self, config: Config) -> None:
        self._every, self._folder = config.train.sample_every, config.run.dir
        self._last: tuple[int, str | None] | None = None

    def after_step(self, run: TrainingLoop) -> None:
        """Generate a sample if due, and after the last step, unless a signal ends the run."""
        is_due = self._every > 0 and run.done % self._every == 0
        has_none = self._last is not None and self._last[1] is None
        if run.stopped > 0 or has_none or not (is_due or run.is_last):
            return
        text = _sample(run)
        self._last = run.done, text
        if text is None or run.mesh.rank:
            return
        write_event(self._folder, "sample", run.done, text)
        if not run.is_last:  # the last one is printed at the end
            run.tell(f"step {run.done}: sample\n{text}")

    def last(self, run: TrainingLoop) -> str | None:
        """Return the sample after the last step; None where there is none. All ranks call it."""
        if self._last is None:
            return _sample(run)
        step, text = self._last
        return text if text is None or step == run.done else _sample(run)


def _sample(run: TrainingLoop) -> str | None:
    """Return a continuation of `train.sample`, equal on every rank; None where there is none."""
    return run.sample() if isinstance(run, Trainer) else None


class FirstStepsCheck(Callback):
    """Keeps loss and gradient norm of the first steps of a run, to compare them with one rank."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.numbers: list[LossAndNorm] = []

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Keep loss and gradient norm of this step, if it is one of the first."""
        if int(row["step"]) == len(self.numbers) + 1 <= self._count:
            self.numbers.append((row["loss"], row["grad_norm"]))
