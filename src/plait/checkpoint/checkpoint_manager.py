"""`CheckpointManager`: saves the checkpoints of a run in the background, and removes old ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from plait.checkpoint.best_marker import best_step, mark_best
from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import checkpoint_name, clean_up, complete_version, prune, rename_later
from plait.checkpoint.optimizer_set import GivenOptimizers
from plait.checkpoint.rank_contents import Checkpointable
from plait.checkpoint.save_task import PendingSave
from plait.checkpoint.saving import StagingBuffer, start_save


class CheckpointManager:
    """Saves a run repeatedly into one folder; writes at most one checkpoint at a time.

    Every rank makes one, and all ranks call its methods together. A failure leaves older checkpoints intact.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        start_step: int | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Keep the newest `keep_last` checkpoints (0: all), those at multiples of `keep_every`, the best one.

        Before the first save, rank 0 removes interrupted checkpoints. `start_step`: the step at which the run
        started or resumed; checkpoints of later steps belong to another run, and are renamed when the first
        one of this run is complete. None: no checkpoint is renamed.
        """
        self._folder = folder
        self.start_step = start_step
        self._is_clean = False
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._disk = disk or Disk()
        self.staging = StagingBuffer()
        """The CPU copies for writing in the background."""
        self._pending: PendingSave | None = None
        self.complete = True
        """Whether the last finished save is complete, even if older checkpoints could not be removed."""

    @property
    def error(self) -> str:
        """Error of the save in progress or "": on rank 0 that of any rank, on another rank only its own."""
        return "" if self._pending is None else self._pending.error

    def save(
        self,
        engine: Checkpointable,
        optimizer: GivenOptimizers,
        step: int,
        state: Mapping[str, Any],
        best_loss: float | None = None,
    ) -> None:
        """Start to save the run after `step` steps; return once copies exist, so that training may continue.

        `best_loss`: the validation loss, where it is the lowest so far: the checkpoint is then `FOLDER/best`.
        First waits for the previous save, see `finish`. Raises `CheckpointError` on all ranks.
        """
        self.finish()
        self.complete = False
        self._pending = start_save(
            engine,
            optimizer,
            self._folder / checkpoint_name(step),
            state,
            self.staging,
            disk=self._disk,
            on_start=self._clean_up,
            before_commit=self._rename_later,
            after_commit=partial(self._after_commit, step, best_loss),
        )

    def finish(self) -> None:
        """Wait for the pending save. Raises `CheckpointError` on all ranks if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.wait()
            finally:
                self.complete = pending.complete

    def _clean_up(self) -> None:
        if not self._is_clean:
            clean_up(self._folder, self._disk)
        self._is_clean = True

    def restore_best(self, step: int, loss: float) -> None:
        """Record on rank 0 that a resumed run's checkpoint of `step` is the best. Raises OSError.

        Another one is recorded where the run was killed before it recorded this one, or goes on from before
        a later one. Without a checkpoint of `step` nothing is changed.
        """
        is_complete = complete_version(self._folder / checkpoint_name(step)) is not None
        if is_complete and best_step(self._folder) != step:
            mark_best(self._folder, step, loss, self._disk)

    def _rename_later(self) -> None:
        if self.start_step is not None:
            rename_later(self._folder, self.start_step, self._disk)
        self.start_step = None

    def _after_commit(self, step: int, best_loss: float | None) -> None:
        if best_loss is not None:
            mark_best(self._folder, step, best_loss, self._disk)
        prune(self._folder, step, **self._keep, disk=self._disk)
