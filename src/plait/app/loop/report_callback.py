"""`Report`: the callback that writes a run's metrics, one recorded step and the HTML report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.app.loop.describe_run import describe, plan_line
from plait.app.loop.loggers import JsonLines, LoggerGroup, unwritable
from plait.app.loop.run_folder import LOCK, locked_folder, set_aside, set_aside_line
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.engine.engine import Engine
from plait.engine.step_recorder import Recording
from plait.errors import DataError, PlaitError
from plait.files import adapter_of
from plait.pictures.report.metrics import EXPERTS_FILE, RANKS_FILE
from plait.pictures.report.page import write_report
from plait.pictures.report.run_json import RunDescription, read_description, write_description
from plait.pictures.report.run_record import METRICS_FILE, write_event
from plait.pictures.report.step_json import RecordedRank, RecordedStep, write_step
from plait.plan.argument_checks import require_flag, require_instance, require_path, require_whole
from plait.ranks.accelerator import is_accelerator
from plait.ranks.clock_offset import clock_offset
from plait.ranks.exchange_with_supervisor import WorldChange
from plait.ranks.group import Counts, Wait
from plait.ranks.text_collectives import all_gather_text

_SHORTEST = 20_000
"""Nanoseconds: shorter waits are left out."""


@dataclass
class StepRecording:
    """A step that is recorded: its timeline, its waits for communication, and its traffic."""

    timeline: Recording
    waits: list[Wait]
    traffic: Counts


def write_step_record(recorded: StepRecording, engine: Engine, step: int, folder: Path) -> None:
    """Write the recorded actions, waits and traffic of `step`, counted from 1, of all ranks; all call it.

    On a GPU waits are left out: they do not block the host. Raises `ConfigError` when the file cannot be
    written. Communication: an all-gather of text over `world`, and what `clock_offset` sends.
    """
    mesh = engine.mesh
    world, schedule = mesh.group("world"), engine.schedule
    offset = clock_offset(world, mesh.device).nanoseconds
    waits = [] if is_accelerator(mesh.device) else recorded.waits
    own = RecordedRank(
        actions=tuple(
            (
                done.action.stage,
                str(done.action.kind),
                done.action.microbatch,
                done.start + offset,
                done.end + offset,
            )
            for done in recorded.timeline.actions()
        ),
        blocked=tuple(
            (axis, start + offset, end + offset) for axis, start, end in waits if end - start >= _SHORTEST
        ),
        traffic={
            axis: {kind: (count.calls, count.bytes) for kind, count in kinds.items()}
            for axis, kinds in recorded.traffic.items()
        },
    )
    adapter = adapter_of(RecordedRank)
    texts = all_gather_text(adapter.dump_json(own).decode(), world, world.device_for_text(mesh.device))
    if mesh.rank:
        return
    ranks = tuple(map(adapter.validate_json, texts))
    record = RecordedStep(step, schedule.policy, schedule.microbatches, tuple(schedule.rank_of), ranks)
    try:
        write_step(record, folder)
    except OSError as error:
        raise unwritable(folder, error) from None


_COUNTS = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of the first line: time that is idle, and that waits for a disk."""
_COUNTED = 8
"""Columns; the two after them, of guests, are in the first ones."""


class ProcessorUse:
    """Measures how busy the processors of this host are, with all processes, between two readings."""

    def __init__(self, path: Path = _COUNTS) -> None:
        self._path = path
        self._before = self._times()

    def share(self) -> float | None:
        """Return the busy share of the processors since the last call, 0 to 1; None if unknown."""
        before, self._before = self._before, self._times()
        if before is None or self._before is None:
            return None
        busy, whole = self._before[0] - before[0], self._before[1] - before[1]
        return min(1.0, max(0.0, busy / whole)) if whole > 0 else None

    def _times(self) -> tuple[int, int] | None:
        """Return busy and whole time since the host started, of all processors; None if unknown."""
        with suppress(OSError, ValueError, IndexError):
            with self._path.open(encoding="ascii") as file:
                name, *columns = file.readline().split()
            times = [int(one) for one in columns[:_COUNTED]]
            idle = sum(times[column] for column in _IDLE)
            return (sum(times) - idle, sum(times)) if name == "cpu" else None
        return None


_WARNING = "WARNING: "
_WARM_UP = 10
"""Of the steps from the start or resumption on, the one that is recorded: the first ones are slower."""
_MOST_NUMBERS = 1_000_000
"""Numbers of all ranks and steps that are written; of larger runs only every so many steps."""


class Report(Callback):
    """Writes the metrics of a run to a folder, the other files of its report, and at the end the page.

    On rank 0: `metrics.jsonl`, one line a step; `run.json`, the plan and what each rank holds; `ranks.jsonl`,
    for each step how long each rank was blocked, and its memory; `experts.jsonl`, the tokens of each expert;
    `step.json`, the timeline of one step; `events.jsonl`; `report.html`. Place it after callbacks that add
    numbers.
    Communication: after the recorded step an all-gather of its actions, as text, over the world.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        step: int = 0,
        page: bool = True,
        metrics: bool = True,
        field: str = "",
        locks: bool = True,
    ) -> None:
        """Write to `folder`; record step `step`, counted from 1; 0: the tenth since the start or resumption.

        `page`: whether to record a step, and to write the page. `metrics`: whether to write `metrics.jsonl`;
        False where a `Log` does. `field`: the field of a configuration that names the folder, for messages.
        `locks`: whether to lock the folder while the run lasts; False where the caller has.
        """
        require_path("Report's folder", folder)
        require_whole("Report's step", step, least=0)
        require_flag("Report's page", page)
        require_flag("Report's metrics", metrics)
        require_flag("Report's locks", locks)
        require_instance("Report's field", field, str, "give the name of a field, or no field")
        self._folder, self._page, self._field = Path(folder), page, field
        self._asked, self._of_report = step, 0
        self._show: Callable[[str], None] = print
        self._writes, self._begun, self._step, self._every = False, False, 0, 1
        self._description: RunDescription | None = None
        self._early_warnings: list[str] = []
        self._locks, self.has_page = locks, False
        self._stack, self._lock = ExitStack(), ExitStack()
        self._recorded: StepRecording | None = None
        self._processors = ProcessorUse()
        lines = [JsonLines(self._folder / METRICS_FILE)] if metrics else []
        self._metrics = LoggerGroup(lines, self._folder, field)
        self._ranks = LoggerGroup([JsonLines(self._folder / RANKS_FILE)], self._folder, field)
        self._experts = LoggerGroup([JsonLines(self._folder / EXPERTS_FILE)], self._folder, field)
        self._has_experts = False
        """Whether the file of experts has been opened."""

    def describe(self, description: RunDescription) -> None:
        """Set what `run.json` contains, on rank 0; by default a description made of engine and batches."""
        self._description = description

    def tell_through(self, show: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that prints a line through `show`, and records it as an event if a warning."""
        self._show = show
        return self._tell

    def begin(self, run: TrainingLoop) -> None:
        """Lock the folder, describe the run, and start the files; drop rows after a resumption.

        Raises `ConfigError` where another run has the folder, or it cannot be written to.
        """
        if self._locks:
            self._lock.enter_context(locked_folder(self._folder, LOCK, run.mesh, field=self._field))
        self._step, self._writes = run.done, run.mesh.rank == 0
        self._every = max(1, run.steps * run.mesh.world // _MOST_NUMBERS)
        if self._page:
            later = self._asked > run.done
            self._of_report = self._asked if later else min(run.done + _WARM_UP, run.steps)
        self._listen(run)
        if not self._writes:
            return
        try:
            self._start_files(run)
        except OSError as error:
            raise unwritable(self._folder, error, self._field) from None
        self._metrics.begin(run.resumed_steps)
        self._ranks.begin(run.resumed_steps)
        write_event(self._folder, "start", run.resumed_steps, "")
        for line in self._early_warnings:
            write_event(self._folder, "warning", run.resumed_steps, line)
        self._begun = True

    def _start_files(self, run: TrainingLoop) -> None:
        """Keep the files of an earlier run, and write `run.json`. Raises `OSError`."""
        kept = None if run.resumed_steps else set_aside(self._folder)
        if kept is not None:
            self._show(set_aside_line(kept))
        about = self._description
        if about is None:
            title = self._folder.resolve().name
            lines = [plan_line(run.engine.plan, run.mesh, run.batches.size)]
            about = describe(run.engine, title, lines, rows=run.batches.size, notes=run.notes)
        with suppress(DataError):  # a damaged one is replaced
            before = read_description(self._folder) if run.resumed_steps else None
            about = replace(about, id=before.id if before is not None and before.id else about.id)
        write_description(about, self._folder)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is recorded."""
        return step == self._of_report

    def before_step(self, run: TrainingLoop) -> None:
        """Start the recording of this step if it is to be recorded."""
        self._listen(run)
        if self.is_due(run.done + 1):
            self._recorded = StepRecording(self._stack.enter_context(run.engine.recording()), [], {})
            run.mesh.traffic.waits = self._recorded.waits

    def submitted(self, run: TrainingLoop) -> None:
        """End the recording of the step, before validation and replica checks, which do not belong to it."""
        if self._recorded is not None:
            self._stack.close()
            run.mesh.traffic.waits, self._recorded.traffic = None, run.engine.traffic()

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Write the numbers of the step and of each rank, and the recorded step."""
        self._step = int(row["step"])
        recorded = self._recorded
        if recorded is not None and self.is_due(self._step):
            self._recorded = None
            write_step_record(recorded, run.engine, self._step, self._folder)
        if not self._writes or run.numbers is None:
            return
        if (share := self._processors.share()) is not None:
            row["cpu_utilization"] = round(share, 4)
        failures = [self._metrics.write(row)]
        if (self._step - 1) % self._every == 0:
            series: dict[str, Any] = {
                "step": self._step,
                "blocked_seconds": [round(seconds, 6) for seconds in run.numbers.blocked_seconds],
                "peak_memory_bytes": list(run.numbers.peak_memory),
            }
            failures.append(self._ranks.write(series))
            if chosen := run.numbers.experts.tokens:
                if not self._has_experts:
                    self._experts.begin(run.resumed_steps)
                self._has_experts = True
                line: dict[str, Any] = {"step": self._step, "tokens": chosen}
                line |= {"sent": run.numbers.experts.sent, "received": run.numbers.experts.received}
                if "forced_routing" in row:
                    line["forced_routing"] = True
                failures.append(self._experts.write(line))
        for failure in filter(None, failures):
            self._tell(f"{_WARNING}{failure}")

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Write the event of the run's end and the report page; release the lock of the folder."""
        with self._lock:
            self._stack.close()
            if self._writes:
                self._end_files(run, error)

    def _end_files(self, run: TrainingLoop, error: BaseException | None) -> None:
        self._metrics.close(error)
        self._ranks.close(error)
        self._experts.close(error)
        if isinstance(error, WorldChange):  # the run goes on, on more ranks, which write the page
            write_event(self._folder, "resized", run.done, str(error))
            return
        if error is not None:
            write_event(self._folder, "failed", run.done, str(error) or type(error).__name__)
        else:
            write_event(self._folder, "stopped" if run.stopped > 0 else "finished", run.done, "")
        if self._page:
            self._write_page()

    def _write_page(self) -> None:
        """Write the page; where that is impossible, the run goes on with a warning."""
        try:
            write_report([self._folder])
            self.has_page = True
        except (PlaitError, OSError) as error:
            self.has_page = False
            self._show(f"{_WARNING}the report could not be written: {error}")

    def _listen(self, run: TrainingLoop) -> None:
        """Make the run's `tell` also write warnings to the events, unless it does so already."""
        if run.tell != self._tell:
            run.tell = self.tell_through(run.tell)

    def _tell(self, line: str) -> None:
        self._show(line)
        if not line.startswith(_WARNING):
            return
        if not self._begun:
            self._early_warnings.append(line.removeprefix(_WARNING))
        elif self._writes:
            write_event(self._folder, "warning", self._step, line.removeprefix(_WARNING))
