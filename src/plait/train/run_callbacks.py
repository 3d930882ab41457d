"""Callbacks of `plait train`: traces and reordered schedules, progress, signals to stop, first steps."""

from __future__ import annotations

from contextlib import ExitStack

from plait.engine import Recording
from plait.loop.training import Callback, TrainingLoop
from plait.train.balance_reorder_trace import reorder, write_schedule, write_trace
from plait.train.config import Config
from plait.train.progress import ProgressReporter
from plait.train.reference_steps import LossAndNorm
from plait.train.stop_signals import StopSignals


class Recordings(Callback):
    """Writes the trace of step `run.trace`, and sets a shorter schedule after step `parallel.reorder`."""

    def __init__(self, config: Config, progress: ProgressReporter) -> None:
        self._folder, self._progress = config.run.dir, progress
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
        """Start to record if the step is due."""
        if self.is_due(run.done + 1):
            self._recording = self._stack.enter_context(run.engine.recording())

    def after_step(self, run: TrainingLoop) -> None:
        """Write the trace, and search a schedule, from what was recorded."""
        self._stack.close()
        recording, self._recording = self._recording, None
        if recording is not None and run.done == self._trace:
            self._progress.print(write_trace(recording, run.done, self._folder, run.mesh))
        if recording is not None and run.done == self._reorder:
            self._progress.print(reorder(run.engine, recording, run.done, self._folder, run.mesh))


class Progress(Callback):
    """Shows the progress of a run, stops it on signals, and keeps the numbers of its first steps."""

    def __init__(self, progress: ProgressReporter, stop: StopSignals, compare: int) -> None:
        self._progress, self._stop, self._compare = progress, stop, compare
        self.first: list[LossAndNorm] = []
        """Results of the first `run.compare` steps."""

    def begin(self, run: TrainingLoop) -> None:
        """Start the bar at the steps that are done."""
        run.requested_stop = lambda: self._stop.local
        self._progress.__enter__()
        self._progress.start_from(run.done)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Show the step, and keep its numbers if `run.compare` asks for them."""
        step = int(row["step"])
        self._progress.update(step, row["loss"], row["tokens_per_second"])
        if step == len(self.first) + 1 <= self._compare:
            self.first.append((row["loss"], row["grad_norm"]))

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """End the bar."""
        self._progress.__exit__()
