"""`Checkpoints`: the callback that saves checkpoints of a training run and resumes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.optim import Optimizer

from plait.app.loop.builtin_callbacks import watched_validation
from plait.app.loop.run_folder import locked_folder
from plait.app.loop.run_state import OWN_KEYS, Check, resume_from, run_state, tell_differences
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.validation import LowestLoss, Validation
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import (
    BEST,
    BestCheckpoint,
    all_checkpoints,
    best_checkpoints,
    best_step,
    with_new_best,
    withdraw,
)
from plait.checkpoint.loading import Loaded, load_checkpoint
from plait.checkpoint.snapshots.snapshots import Snapshots
from plait.engine.engine import Engine
from plait.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    NonFiniteError,
    ReplicaError,
    listed,
    terminal_text,
)
from plait.plan.argument_checks import require_instance, require_number, require_path, require_whole
from plait.ranks.exchange_with_supervisor import (
    WorldChange,
    found_at_start,
    newest_good_step,
    note_begun_anew,
    note_restored,
    supervisor_of_rank,
)
from plait.ranks.run_kept_in_memory import keeps_runs, take_moved_run
from plait.ranks.text_collectives import broadcast_result

T = TypeVar("T")
MakeSnapshots = Callable[[Engine, Optimizer], Snapshots]
LOCK = "checkpoints.lock"
"""Names the process that saves checkpoints into a folder."""


class Checkpoints(Callback):
    """Saves checkpoints of a training run and resumes it; every rank makes one with the same arguments."""

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int | None = 0,
        minutes: float = 0.0,
        keep_last: int = 2,
        keep_every: int = 0,
        keep_best: bool | int = False,
        watch: str | None = None,
        resume: str | Path = "auto",
        state: Mapping[str, Any] | None = None,
        check: Check | None = None,
        start_over: str = "resume='no'",
        snapshots: MakeSnapshots | None = None,
        require_snapshots: bool = True,
    ) -> None:
        """Save into `folder` every `every` steps; 0: only at the end; None: never.

        `minutes`: save also after the first step that ends so long after the last save, by rank 0's clock.
        `keep_last` newest ones are kept (0: all), and those at multiples of `keep_every` steps. `keep_best`:
        save after each validation with the lowest loss so far, too, and keep the last of these: `FOLDER/best`
        names it; a number: keep so many, those with the lowest losses, of equal ones the earlier. Of several
        validations the one named `watch` counts, or the first. `resume`: "auto", from the newest one in
        `folder` that is not damaged, if there is one; "no"; or the folder of a checkpoint.
        `state`: JSON values that are saved too; `check(state, path)` may refuse those of a checkpoint. Each
        checkpoint has the `state_dict` of all callbacks.

        `snapshots`: makes `plait.Snapshots` of engine and optimizer, such as `functools.partial(
        plait.Snapshots, every=10)`: they are taken besides, and the run resumes from one where none of the
        checkpoints is newer; with another `resume` than "auto" only from those of ranks that torchrun
        restarts. Without `require_snapshots` the run goes on after a warning where one cannot be taken.
        Raises `ConfigError` for other arguments.
        """
        _require_arguments(folder, resume, state, check, start_over)
        _require_times(every, minutes, keep_last, keep_every, keep_best)
        if watch is not None and not keep_best:
            raise ConfigError(
                f"Checkpoints' watch is {watch!r}, but keep_best is False: set it to True, too."
            )
        self._folder, self._every, self._start_over = Path(folder), every, start_over
        self._resume, self._watch = str(resume), watch
        self._state = {} if state is None else dict(state)
        self._check = check or (lambda state, path: None)
        self._most_best, self._best = int(keep_best), list[BestCheckpoint]()
        self._best_before: Mapping[str, Any] = {}
        self._minutes, self._saved_at = minutes, 0.0
        self._make_snapshots, self._needs_snapshots = snapshots, require_snapshots
        self._snapshots: Snapshots | None = None
        self._validation = Validation(None)
        self._tell: Callable[[str], None] = print
        self._manager = CheckpointManager(
            self._folder, keep_last=keep_last, keep_every=keep_every, start_step=0
        )
        self._warned = False
        self._from_memory = -1
        """After how many steps the run went on from memory."""
        self._stack = ExitStack()

    def resume(self, run: TrainingLoop) -> None:
        """Load the checkpoint or snapshot to resume from, if any; set `run.done` to its finished steps.

        Raises `CheckpointError`, `DataError` where batches are others, and the errors of `check`.
        """
        self._tell, source = run.tell, self._resume
        if self._make_snapshots is not None:
            make = partial(self._make_snapshots, run.engine, run.optimizer)
            self._snapshots = self._unless_failed(make)
        own = source != "auto"  # only what ranks of this launch have saved, before they were restarted
        damaged: list[str] = []
        for step, path in self._saved(run, own_launch=own) if supervisor_of_rank() or not own else ():
            if self._resume_from_memory(run, own_launch=own, after=step - 1):
                return
            try:
                self._load(path, run)
                return
            except CheckpointError as error:
                if not error.damaged:
                    raise
                self._tell(f"WARNING: {error}")
                damaged.append(path.name)
        if self._resume_from_memory(run, own_launch=own):
            return
        if damaged and not own:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged ({listed(damaged)}): mend one, or start over "
                f"with {self._start_over}."
            )
        self._begin(run, source)

    def _begin(self, run: TrainingLoop, source: str) -> None:
        """Start from step 0, or the checkpoint that `resume` names, and remove older snapshots in memory."""
        note_begun_anew()
        if source == "auto":
            self._tell(f"There is no checkpoint in {self._folder}: the run starts from the beginning.")
            return
        if source != "no":
            self._load(Path(source).expanduser(), run)
        if self._snapshots is not None:  # else a later start would find those of another run
            self._unless_failed(self._snapshots.clear)

    def replanned(self, run: TrainingLoop) -> None:
        """Let later snapshots hold the state of the engine that replaces the run's earlier one."""
        if (snapshots := self._snapshots) is not None:
            self._unless_failed(lambda: snapshots.go_on_with(run.engine, run.optimizer))

    def begin(self, run: TrainingLoop) -> None:
        """Find the validation that decides which checkpoints are best, and lock the folder of checkpoints.

        Raises `ConfigError` where another run saves there, `DataError` where there is no validation.
        """
        self._tell = run.tell
        if self._most_best:
            self._validation = watched_validation(self, run, self._watch)
            self._best = self._known_best()
        if self._every is not None or self._most_best:
            lock = locked_folder(self._folder, LOCK, run.mesh, must_be_writable=False)
            self._stack.enter_context(lock)
        if self._best and run.resumed_steps and run.mesh.rank == 0:
            with suppress(OSError):  # a folder that cannot be written to is told when a checkpoint is due
                self._manager.restore_best(self._best)

    def _known_best(self) -> list[BestCheckpoint]:
        """Return the best checkpoints of before, where they are of the same validation, on the same data."""
        lowest, before = self._validation.lowest, self._best_before
        if lowest is None:
            return []
        kept = [BestCheckpoint(step, loss) for step, loss in before.get("best", ())]
        if before.get("watch") == self._validation.loss_name and kept:
            return kept[: self._most_best]
        return [BestCheckpoint(lowest.step, lowest.loss)]

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written."""
        return not self._manager.complete

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint or a snapshot is due after `step`, by its number."""
        is_snapshot_due = self._snapshots is not None and self._snapshots.is_due(step)
        return is_snapshot_due or self._is_checkpoint_due(step)

    def _is_checkpoint_due(self, step: int) -> bool:
        return bool(self._every) and step % (self._every or 1) == 0

    def after_step(self, run: TrainingLoop) -> None:
        """Save a checkpoint and take a snapshot where either is due; a failure is a warning.

        A checkpoint is due also after the last step, and where the loss is among the lowest.
        """
        self._save_if_due(run)
        if (snapshots := self._snapshots) is not None and (snapshots.is_due(run.done) or keeps_runs()):
            if snapshots.is_due(run.done):
                run.engine.compare_memory()
            leaves = not run.is_last
            self._unless_failed(lambda: snapshots.step(run.done, run_state(run, self._state), leaves=leaves))

    def _save_if_due(self, run: TrainingLoop) -> None:
        clock = 0.0 if run.numbers is None else run.numbers.clock
        in_time = bool(self._minutes) and clock - self._saved_at >= 60 * self._minutes
        if in_time:
            run.finish()  # raises where the step's loss is not finite: its parameters are not worth saving
        step, best = run.done, self._best_with(run)
        is_planned = self._every is not None and (run.is_last or self._is_checkpoint_due(step))
        if not is_planned and not in_time and best is None:
            self._warn_early()
            return
        self._saved_at, self._best = clock, self._best if best is None else best
        run.engine.compare_memory()
        self.finish()
        self._try(
            lambda: self._manager.save(run.engine, run.optimizer, step, run_state(run, self._state), best)
        )

    def _best_with(self, run: TrainingLoop) -> list[BestCheckpoint] | None:
        """Return the best checkpoints if the last step's is among them, else None."""
        loss = run.row.get(self._validation.loss_name) if self._most_best else None
        if loss is None or int(run.row["step"]) != run.done:
            return None
        new = BestCheckpoint(run.done, loss)
        best = with_new_best(self._best, new, self._most_best)
        return best if new in best else None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the checkpoints that are kept for their validation losses, and the name of the loss."""
        if not self._best:
            return {}
        return {"watch": self._validation.loss_name, "best": [list(one) for one in self._best]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the list of best checkpoints from a `state_dict`."""
        self._best_before = state

    def finish(self) -> None:
        """Block until the last checkpoint is written."""
        self._try(self._manager.finish)
        self._warned = False

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Finish saving, rename checkpoints that may have wrong bits, and close or release the snapshots.

        Not finished where the run ended by an error that other ranks may not have.
        """
        with self._stack:
            if error is None and self._every is not None and run.done == self._from_memory:
                # No step was taken since then, and its checkpoint may not be complete.
                state = run_state(run, self._state)
                self._try(lambda: self._manager.save(run.engine, run.optimizer, run.done, state))
            if error is None or isinstance(error, NonFiniteError | ReplicaError | WorldChange):
                self.finish()
        if isinstance(error, CorruptionError):
            self._withdraw_after(error.last_good_step)
        # Where nothing else holds the state of the last step, a later run may need the snapshots.
        is_needed = self.failed or (run.stopped > 0 and self._every is None)
        if self._snapshots is not None and error is None and not is_needed:
            self._unless_failed(self._snapshots.close)
        elif self._snapshots is not None:
            self._snapshots.release(error)
        lowest = self._validation.lowest
        if error is None and run.mesh.rank == 0 and lowest is not None:
            self._tell(self._best_line(lowest))

    def _withdraw_after(self, step: int) -> None:
        """Withdraw checkpoints and snapshots of more than `step` steps, whose bits may be wrong."""
        if self._snapshots is not None:
            self._snapshots.withdraw_after(step)
        try:
            _tell_withdrawn(self._manager.withdraw_after(step))
        except OSError as error:
            line = f"WARNING: checkpoints after step {step} may have wrong bits, and were not renamed: "
            print(terminal_text(f"{line}{error.strerror or error}."), flush=True)

    def _best_line(self, lowest: LowestLoss) -> str:
        """Return which step had the lowest validation loss, and where its checkpoint is."""
        is_kept = best_step(self._folder) == lowest.step
        where = f": {self._folder / BEST}" if is_kept else f", which has no checkpoint in {self._folder}"
        others = best_checkpoints(self._folder)[1:] if self._most_best > 1 else []
        next_ones = ", ".join(f"{one.loss:.3f} of step {one.step}" for one in others)
        kept = f" The next ones are kept, too: {next_ones}." if others else ""
        return f"The lowest validation loss, {lowest.loss:.3f}, is that of step {lowest.step}{where}.{kept}"

    def _load(self, path: Path, run: TrainingLoop) -> None:
        loaded = load_checkpoint(run.engine, run.optimizer, path, "given")
        resume_from(run, loaded, path, self._check, self._start_over)
        if self._folder.resolve() in (path.resolve(), path.resolve().parent):
            run.resumed_steps = self._manager.start_step = run.done
        note_restored(run.done)
        self._tell(f"Resumed from {path}, after step {run.done}.")
        tell_differences(run, loaded)

    def _resume_from_memory(self, run: TrainingLoop, *, own_launch: bool = False, after: int = -1) -> bool:
        """Resume from the newest snapshot, if it has more than `after` steps; return whether there is one.

        `own_launch`: only from one of ranks that the same torchrun restarted.
        """
        if (snapshots := self._snapshots) is not None:
            found = snapshots.load_newest("given", self._tell, own_launch=own_launch, after=after)
            loaded, source = None if found is None else found[1], snapshots.folder
        else:  # taking them has failed, but what ranks have kept may have moved
            moved = take_moved_run(run.engine)
            loaded, source = None if moved is None else Loaded(dict(moved.state), {}), self._folder
        if loaded is None:
            return False
        resume_from(run, loaded, source, self._check, self._start_over)
        run.resumed_steps = self._manager.start_step = run.done
        self._from_memory = run.done
        self._tell(f"Resumed from memory, {source}, after step {run.done}.")
        tell_differences(run, loaded)
        return True

    def _saved(self, run: TrainingLoop, *, own_launch: bool) -> list[tuple[int, Path]]:
        """Return on every rank the checkpoints that rank 0 finds, with their steps, newest first.

        `own_launch`: only those that were saved since a supervisor first started these ranks.
        """

        def find() -> str:
            try:
                found, most = all_checkpoints(self._folder), newest_good_step()
                before: set[str] = set()
                if own_launch:
                    names = {path: _name_of_version(path) for _, path in found}
                    before = found_at_start(self._folder, names.values())
                    found = [(step, path) for step, path in found if names[path] not in before]
                if most is not None:
                    wrong = {step for step, _ in found if step > most}
                    _tell_withdrawn(withdraw(self._folder, wrong, Disk()))
                    found = [(step, path) for step, path in found if step not in wrong]
                return json.dumps([[(step, str(path)) for step, path in found], sorted(before)])
            except OSError:
                error = f"{self._folder} cannot be read: mend its permissions, or the disk."
                raise CheckpointError(error) from None

        found = broadcast_result(find, CheckpointError, run.mesh.group("world"), run.mesh.device)
        paths, before = json.loads(found)
        if own_launch:  # any host may have rank 0 later
            found_at_start(self._folder, before)
        return [(step, Path(path)) for step, path in paths]

    def _try(self, action: Callable[[], None]) -> None:
        """Call `action`; print a `CheckpointError` as a warning, unless `_warn_early` has done so."""
        try:
            action()
        except CheckpointError as error:
            if not self._warned:
                self._tell(f"WARNING: {error}")

    def _unless_failed(self, action: Callable[[], T]) -> T | None:
        """Return the result of an action on snapshots; where one may fail, warn, and take no more."""
        try:
            return action()
        except CheckpointError as error:
            if self._needs_snapshots:
                raise
            self._snapshots = None
            self._tell(f"WARNING: the run goes on without snapshots in memory: {error}")
            return None

    def _warn_early(self) -> None:
        """On rank 0, print once that the background save has failed; other ranks learn it when they wait."""
        if self._manager.error and not self._warned:
            self._warned = True
            self._tell(f"WARNING: {self._manager.error}")


def _tell_withdrawn(paths: Sequence[Path]) -> None:
    """Print which checkpoints were renamed, on the rank that found wrong bits."""
    if paths:
        names = listed([path.name for path in paths])
        line = f"WARNING: checkpoints in {paths[0].parent} may have wrong bits: they are now called {names}."
        print(terminal_text(line), flush=True)


def _name_of_version(path: Path) -> str:
    """Return a text that identifies a saved checkpoint: its path, inode and time of modification."""
    status = path.stat()
    return f"{path.name} {status.st_ino} {status.st_mtime_ns}"


def _require_arguments(
    folder: object, resume: object, state: object, check: object, start_over: object
) -> None:
    """Raise ConfigError for an argument of `Checkpoints` of another type."""
    require_path("Checkpoints' folder", folder)
    require_instance("Checkpoints' resume", resume, (str, Path), 'give "auto", "no" or a folder')
    if state is not None:
        require_instance("Checkpoints' state", state, Mapping, "give a dictionary of JSON values")
        assert isinstance(state, Mapping)
        if own := [key for key in OWN_KEYS if key in state]:
            raise ConfigError(
                f"Checkpoints' state has {listed(own)}, which a run saves itself to go on from: give it "
                "another name."
            )
    if check is not None and not callable(check):
        raise ConfigError(f"Checkpoints' check is {check!r}: give a function of state and path.")
    require_instance("Checkpoints' start_over", start_over, str, "give the words of an option")


def _require_times(
    every: int | None, minutes: float, keep_last: object, keep_every: object, keep_best: object
) -> None:
    """Raise ConfigError for numbers of `Checkpoints` that are out of range, or contradict each other."""
    if every is not None:
        require_whole("Checkpoints' every", every, least=0)
    require_whole("Checkpoints' keep_last", keep_last, least=0)
    require_whole("Checkpoints' keep_every", keep_every, least=0)
    if not isinstance(keep_best, bool):
        require_whole("Checkpoints' keep_best, unless it is True or False,", keep_best)
    require_number("Checkpoints' minutes", minutes)
    if minutes and every is None:
        raise ConfigError(
            f"Checkpoints' minutes is {minutes:g}, but every is None, so that nothing is saved: set "
            "every to 0 to save at the end and after so many minutes."
        )
