"""Callbacks: checks of replicas and of memory, logging, history in memory, progress, an early stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from plait.app.loop.loggers import Logger, LoggerGroup
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.validation import Validation
from plait.engine.corruption.corruption_checks import CorruptionChecks
from plait.errors import ConfigError, DataError, ReplicaError, terminal_text
from plait.plan.argument_checks import require_instance, require_whole


class ReplicaChecks(Callback):
    """Compares parameters and optimizer state that several ranks hold, every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        require_whole("ReplicaChecks' every", every, least=0)
        self._every = every

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every`."""
        return self._every > 0 and step % self._every == 0

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """If due, compare what several ranks hold. Raises `ReplicaError`, which names the step."""
        if self.is_due(int(row["step"])):
            try:
                run.engine.check_replicas(run.optimizer)
            except ReplicaError as error:
                raise ReplicaError(f"step {int(row['step'])}: {error}") from None


class WrongBits(Callback):
    """Finds corrupted memory and wrong results during training, by `plait.CorruptionChecks`.

    Also after the run's engine is replaced by a reshard.
    """

    def __init__(self, *, memory: bool = True, recheck_rate: float = 0.0) -> None:
        """Take the arguments of `CorruptionChecks` besides engine and optimizer."""
        self._memory, self._recheck_rate = memory, recheck_rate
        self._checks: CorruptionChecks | None = None

    def begin(self, run: TrainingLoop) -> None:
        """Start `CorruptionChecks` of the run's engine. Raises PlanError if the plan does not allow them."""
        if self._memory or self._recheck_rate:
            self._checks = CorruptionChecks(
                run.engine, run.optimizer, memory=self._memory, recheck_rate=self._recheck_rate
            )

    def replanned(self, run: TrainingLoop) -> None:
        """Close the checks of the earlier engine, and start checks of the one that replaces it."""
        if self._checks is not None:  # else `begin` is still to come
            self._checks.close()
            self.begin(run)

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """End the checks; without an error, compare memory a last time, which may raise `CorruptionError`."""
        if self._checks is not None:
            checks, self._checks = self._checks, None
            checks.__exit__(None if error is None else type(error), error, None)


class Log(Callback):
    """Writes the numbers of each step to loggers, on rank 0. Place it after callbacks that add numbers."""

    def __init__(self, *loggers: Logger, folder: Path = Path(), field: str = "") -> None:
        """`folder`, and its `field` of a configuration, name the place where a logger fails."""
        for logger in loggers:
            if not all(callable(getattr(logger, name, None)) for name in ("begin", "write", "close")):
                raise ConfigError(
                    f"Log was given {logger!r}, without begin, write and close: give loggers, such as "
                    "plait.loop.JsonLines(path)."
                )
        self._loggers = LoggerGroup(loggers, folder, field)

    def begin(self, run: TrainingLoop) -> None:
        """Open the loggers, on rank 0; drop earlier rows of steps that the resumed run takes again."""
        if run.mesh.rank == 0:
            self._loggers.begin(run.resumed_steps)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Write the row of this step to the loggers."""
        if run.mesh.rank == 0 and (failure := self._loggers.write(row)):
            run.tell(f"WARNING: {failure}")

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Close the loggers."""
        if run.mesh.rank == 0:
            self._loggers.close(error)


class History(Callback):
    """Keeps the numbers of each step in memory, on every rank; about 0.6 kB a step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        """The numbers of each step since the start or resumption, with what other callbacks added."""

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Append the numbers of this step to the history."""
        self.rows.append(row)


_SECONDS_BETWEEN_LINES = 5.0
_SMOOTHING = 0.8  # weight of earlier steps in the shown speed


class Progress(Callback):
    """Shows step, loss, tokens per second and the remaining time: a bar on a terminal, lines elsewhere."""

    def __init__(
        self,
        *,
        shown: bool | None = None,
        bar: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shown`: whether on this rank; None: on rank 0. `bar` False: lines on a terminal too."""
        self._shown, self._with_bar, self._clock = shown, bar, clock
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._shows = bool(shown)
        self._steps = self._first = 0
        self._started = self._printed_at = self._speed = 0.0
        self._bar: Bar | None = None

    def print(self, text: str) -> None:
        """Print a line, with control characters escaped, above the bar if there is one."""
        if self._shows:
            self._console.print(terminal_text(text))

    def begin(self, run: TrainingLoop) -> None:
        """Start the bar at the steps that are done, and set `run.tell` to print above it."""
        self._shows = run.mesh.rank == 0 if self._shown is None else self._shown
        self._steps, self._first, self._speed = run.steps, run.done, 0.0
        self._started = self._printed_at = self._clock()
        run.tell = self.print
        if self._shows and self._with_bar and self._console.is_terminal:
            self._bar = _make_bar(self._console)
            self._bar.start()
            self._bar.add_task("", total=run.steps, completed=run.done, loss="…", speed="…")

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Show the finished step in the bar or as a line."""
        step, loss = int(row["step"]), row["loss"]
        earlier = _SMOOTHING if self._speed else 0.0
        self._speed = earlier * self._speed + (1 - earlier) * row["tokens_per_second"]
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, loss=f"{loss:.3f}", speed=f"{self._speed:,.0f}")
        else:
            self._print_step(step, loss)

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _print_step(self, step: int, loss: float) -> None:
        """Print the first step, the last one, and others every few seconds."""
        now = self._clock()
        if self._first + 1 < step < self._steps and now - self._printed_at < _SECONDS_BETWEEN_LINES:
            return
        self._printed_at = now
        done = max(1, step - self._first)
        left = timedelta(seconds=round((now - self._started) / done * (self._steps - step)))
        self.print(f"step {step}/{self._steps}  loss {loss:.3f}  {self._speed:,.0f} tokens/s  {left} left")


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


class EarlyStop(Callback):
    """Ends the run after `patience` validations in a row without a lower validation loss."""

    def __init__(self, patience: int, *, watch: str | None = None) -> None:
        """Place it after the `Validation` that it watches: the one named `watch`, or the first one."""
        require_whole("EarlyStop's patience", patience)
        if watch is not None:
            require_instance("EarlyStop's watch", watch, str, "give the name of a Validation")
        self._patience, self._watch = patience, watch
        self._validation = Validation(None)

    def begin(self, run: TrainingLoop) -> None:
        """Find the validation; end a run that had ended before it was resumed. Raises `DataError`."""
        self._validation = watched_validation(self, run, self._watch)
        self._stop_if_worse(run, run.done)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Stop the run on all ranks after `patience` validations in a row without a lower loss."""
        if self._validation.loss_name in row:
            self._stop_if_worse(run, int(row["step"]))

    def _stop_if_worse(self, run: TrainingLoop, step: int) -> None:
        lowest, worse = self._validation.lowest, self._validation.worse
        if lowest is not None and worse >= self._patience and not run.stopped:
            run.tell(
                f"The run ends after step {step}: {worse} validation{'s' * (worse > 1)} had no lower loss "
                f"than {lowest.loss:.3f}, that of step {lowest.step}."
            )
            run.stop()


def watched_validation(callback: Callback, run: TrainingLoop, watch: str | None) -> Validation:
    """Return the `Validation` before `callback` that is named `watch` (None: the first). Raises DataError.

    Only those that also run during training count.
    """
    before = takewhile(lambda other: other is not callback, run.callbacks)
    regular = [other for other in before if isinstance(other, Validation) and other.is_regular]
    found = [one for one in regular if watch in (None, one.name)]
    kind = type(callback).__name__
    if not found and regular:
        names = ", ".join(repr(one.name) for one in regular)
        raise DataError(
            f"{kind} watches the validation {watch!r}, but those before it are {names}: name one."
        )
    if not found:
        raise DataError(
            f"{kind} needs validation losses, but nothing before it in the list of callbacks validates "
            "during the run: give fit validation and validate_every, or place a Validation before it."
        )
    if len(found) > 1:
        run.tell(f"{kind} compares {found[0].loss_name}; watch={found[1].name!r} compares another.")
    return found[0]
