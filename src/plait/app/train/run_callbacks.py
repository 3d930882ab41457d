"""Callbacks of `plait train`: run folder, traces, reordered schedules, samples, check of first steps."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from plait.app.config.config import Config
from plait.app.loop.loggers import Csv, JsonLines, Logger, TensorBoard, unwritable
from plait.app.loop.run_folder import EARLIER, REPORT_FILES, set_aside, set_aside_line
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.train.one_rank_comparison import LossAndNorm
from plait.app.train.run_checkpoints import FOLDER
from plait.app.train.trainer import Trainer
from plait.engine.engine import Engine
from plait.engine.step_recorder import Recording
from plait.files import write_bytes
from plait.pictures.report.run_record import METRICS_FILE, write_event
from plait.pictures.timelines.text import title
from plait.pictures.timelines.timeline import simulate
from plait.pictures.timelines.timeline_files import write_pictures
from plait.ranks.mesh import Mesh
from plait.schedules.costs import Costs

FIELD = "run.dir"
"""The field of the configuration that names the folder."""
CONFIG_FILE, SCHEDULE_FILE = "config.json", "schedule.json"
TABLE_FILE, TENSORBOARD_FOLDER = "metrics.csv", "tensorboard"
TRACE_FILES = {"trace": "trace.json", "svg": "trace.svg", "html": "trace.html"}
"""For Perfetto or chrome://tracing; a picture; an interactive page."""
FILES = (*REPORT_FILES, CONFIG_FILE, TABLE_FILE, TENSORBOARD_FOLDER, SCHEDULE_FILE, *TRACE_FILES.values())
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
            raise unwritable(folder, error, FIELD) from None
        if kept is not None:
            run.tell(set_aside_line(kept))


def loggers_of(folder: Path, *, csv_too: bool, tensorboard: bool) -> tuple[Logger, ...]:
    """Return the loggers of a run in `folder`, not yet opened; TensorBoard's only if it is installed."""
    made: list[Logger] = [JsonLines(folder / METRICS_FILE)]
    if csv_too:
        made.append(Csv(folder / TABLE_FILE))
    if tensorboard and find_spec("tensorboard") is not None:
        made.append(TensorBoard(folder / TENSORBOARD_FOLDER))
    return tuple(made)


class Recordings(Callback):
    """Records the steps that `run.trace` and `parallel.reorder` name, to draw them or search a schedule."""

    def __init__(self, config: Config) -> None:
        self._folder = config.run.dir
        self._trace, self._reorder = config.run.trace, config.parallel.reorder
        self._recording: Recording | None = None
        self._stack = ExitStack()

    def begin(self, run: TrainingLoop) -> None:
        """Write the schedule of the first step to `schedule.json`; print which steps to record are over."""
        for name, step in (("run.trace", self._trace), ("parallel.reorder", self._reorder)):
            if 0 < step <= run.done:
                run.tell(f"{name} = {step} does nothing: the run goes on after step {run.done}.")
        write_schedule(run.engine, self._folder, run.mesh)

    def replanned(self, run: TrainingLoop) -> None:
        """Write the schedule of the engine that replaces the run's earlier one to `schedule.json`."""
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


def reorder(engine: Engine, recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Set a schedule that is shorter at the times measured in `step`, if one is found; return a report line.

    `step` is counted from 1. All ranks call it. Raises `ConfigError` when the file cannot be written.
    Communication: that of `Recording.costs` and `Engine.reorder`.
    """
    before, costs = engine.schedule, recording.costs()
    after = engine.reorder(costs)
    write_schedule(engine, folder, mesh, costs)
    if after.order == before.order:
        return f"Order after step {step}: {before.policy} stays, none that is shorter was found."
    was, will_be = (simulate(order.split_backward, costs).makespan for order in (before, after))
    return (
        f"Order after step {step}: {after.policy} in place of {before.policy}, {will_be:,.1f} ms a step "
        f"simulated in place of {was:,.1f}, in {SCHEDULE_FILE}."
    )


def write_schedule(engine: Engine, folder: Path, mesh: Mesh, costs: Costs | None = None) -> None:
    """Write the engine's schedule to a file in `folder`, on rank 0, in the format of `plait schedule --json`.

    `costs` are those that it was searched for; times are then in milliseconds. Raises `ConfigError` when the
    file cannot be written.
    """
    if mesh.rank != 0:
        return
    result = simulate(engine.schedule, costs).as_json()
    if costs is not None:
        result["costs"] = {name: getattr(costs, name) for name in ("F", "I", "W", "comm")}
    try:
        write_bytes(folder / SCHEDULE_FILE, f"{json.dumps(result)}\n".encode())
    except OSError as error:
        raise unwritable(folder, error, FIELD) from None


def write_trace(recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Write pictures of the timeline measured in `step` to `folder`, on rank 0; return a line about it.

    `step` is counted from 1. All ranks call it. Of ranks that differ in `dp` or `tp` the files show those of
    rank 0's pipeline. Raises `ConfigError` when they cannot be written. Communication: two all-gathers over
    `pp`.
    """
    timeline, costs = recording.timeline(), recording.costs()
    if mesh.rank == 0:
        paths = {kind: folder / file for kind, file in TRACE_FILES.items()}
        list(write_pictures(timeline, paths, name=f"{title(timeline.schedule)}; step {step} as it was"))
    simulated = simulate(timeline.schedule, costs)
    return (
        f"Trace of step {step}: makespan {timeline.makespan:,.1f} ms "
        f"({simulated.makespan:,.1f} simulated with its costs), "
        f"bubble {timeline.bubble:.1%} ({simulated.bubble:.1%}), in {', '.join(TRACE_FILES.values())}."
    )


class Samples(Callback):
    """Generates text every `train.sample_every` steps and at the end, and writes it for the report.

    All but the last text are printed.
    """

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
        """Return the text sampled after the last step, or None; generates it if needed. All ranks call it."""
        if self._last is None:
            return _sample(run)
        step, text = self._last
        return text if text is None or step == run.done else _sample(run)


def _sample(run: TrainingLoop) -> str | None:
    """Return a continuation of `train.sample`, equal on every rank; None where there is none."""
    return run.sample() if isinstance(run, Trainer) else None


class FirstStepsRecord(Callback):
    """Keeps loss and gradient norm of the first steps of a run, to compare them with one rank."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.numbers: list[LossAndNorm] = []

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Keep loss and gradient norm of this step, if it is one of the first."""
        if int(row["step"]) == len(self.numbers) + 1 <= self._count:
            self.numbers.append((row["loss"], row["grad_norm"]))
