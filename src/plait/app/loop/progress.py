"""Progress of a run: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.errors import terminal_text

_SECONDS_BETWEEN_LINES = 5.0
_SMOOTHING = 0.8  # weight of earlier steps in the shown speed


class ProgressReporter:
    """Shows step, loss, tokens per second and the remaining time; a context manager.

    With `shown=False` (on ranks other than 0) it shows nothing. `bar=False`: lines on a terminal too.
    """

    def __init__(
        self,
        steps: int,
        *,
        shown: bool = True,
        bar: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._steps = steps
        self._shown = shown
        self._clock = clock
        self._first = 0
        self._started = self._printed_at = clock()
        self._speed = 0.0
        self._bar = _make_bar(self._console) if shown and bar and self._console.is_terminal else None
        self._task: TaskID | None = None

    def start_from(self, steps: int) -> None:
        """Set the number of steps that were finished before the run was resumed."""
        self._first = steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=steps)

    def print(self, text: str) -> None:
        """Print a line, which may quote files, above the bar if there is one."""
        if self._shown:
            self._console.print(terminal_text(text))

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Report that `step`, counted from 1, is finished."""
        earlier = _SMOOTHING if self._speed else 0.0
        self._speed = earlier * self._speed + (1 - earlier) * tokens_per_second
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", speed=f"{self._speed:,.0f}")
        elif self._shown:
            self._print_step(step, loss)

    def __enter__(self) -> Self:
        self._started = self._printed_at = self._clock()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps, loss="…", speed="…")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print_step(self, step: int, loss: float) -> None:
        now = self._clock()
        if self._first + 1 < step < self._steps and now - self._printed_at < _SECONDS_BETWEEN_LINES:
            return
        self._printed_at = now
        done = max(1, step - self._first)
        left = timedelta(seconds=round((now - self._started) / done * (self._steps - step)))
        self.print(f"step {step}/{self._steps}  loss {loss:.3f}  {self._speed:,.0f} tokens/s  {left} left")


class Progress(Callback):
    """Shows the progress of a run on rank 0: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, reporter: ProgressReporter | None = None) -> None:
        """None: a `ProgressReporter` of the run's steps."""
        self._given = reporter
        self._reporter = reporter or ProgressReporter(0, shown=False)

    def begin(self, run: TrainingLoop) -> None:
        """Start the bar at the steps that are done; other lines are printed above it."""
        self._reporter = self._given or ProgressReporter(run.steps, shown=run.mesh.rank == 0)
        run.tell = self._reporter.print
        self._reporter.__enter__()
        self._reporter.start_from(run.done)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Show the finished step in the bar or as a line."""
        self._reporter.update(int(row["step"]), row["loss"], row["tokens_per_second"])

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """End the bar."""
        self._reporter.__exit__()


def _make_bar(console: Console) -> Bar:
    return Bar(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        expand=True,
    )
