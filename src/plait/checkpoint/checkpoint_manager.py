"""`CheckpointManager`: saves the checkpoints of a run in the background, and removes old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import (
    BestCheckpoint,
    best_checkpoints,
    checkpoint_name,
    clean_up,
    complete_version,
    mark_best,
    prune,
    rename_later,
    withdraw,
)
from plait.checkpoint.optimizer_set import GivenOptimizers
from plait.checkpoint.rank_contents import Checkpointable
from plait.checkpoint.save_task import PendingSave
from plait.checkpoint.saving import StagingBuffer, start_save

_SECONDS_TO_WITHDRAW = 10.0
"""For a checkpoint that is being written, whose other ranks may be gone."""


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
        """Keep the newest `keep_last` checkpoints (0: all), multiples of `keep_every`, and the best ones.

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
        self._saved = set[int]()
        """The steps of the checkpoints that were begun."""
        self.complete = True
        """Whether the last finished save is complete, even if older checkpoints could not be removed."""

    @property
    def error(self) -> str:
        """Error of the save in progress, or "": on rank 0 any rank's, on other ranks their own."""
        return "" if self._pending is None else self._pending.error

    def save(
        self,
        engine: Checkpointable,
        optimizer: GivenOptimizers,
        step: int,
        state: Mapping[str, Any],
        best: Sequence[BestCheckpoint] | None = None,
    ) -> None:
        """Start to save the run after `step` steps; return once copies exist, so that training may continue.

        `best`: the checkpoints to be kept for their validation losses, the lowest first, with this one; None:
        those of before. The first of them is `FOLDER/best`. First waits for the previous save, see `finish`.
        Raises `CheckpointError` on all ranks.
        """
        self.finish()
        self.complete = False
        self._saved.add(step)
        self._pending = start_save(
            engine,
            optimizer,
            self._folder / checkpoint_name(step),
            state,
            self.staging,
            disk=self._disk,
            on_start=self._clean_up,
            before_commit=self._rename_later,
            after_commit=partial(self._after_commit, step, best),
        )

    def finish(self) -> None:
        """Wait for the pending save. Raises `CheckpointError` on all ranks if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.wait()
            finally:
                self.complete = pending.complete

    def withdraw_after(self, step: int) -> list[Path]:
        """Rename this run's checkpoints of more than `step` steps, since their bits may be wrong.

        Return the paths that this rank gave them. Without communication: any rank may call it. Waits for the
        checkpoint that is being written, for some seconds at most. Raises OSError.
        """
        if self._pending is not None:
            self._pending.has_ended(_SECONDS_TO_WITHDRAW)
        return withdraw(self._folder, {one for one in self._saved if one > step}, self._disk)

    def _clean_up(self) -> None:
        if not self._is_clean:
            clean_up(self._folder, self._disk)
        self._is_clean = True

    def restore_best(self, best: Sequence[BestCheckpoint]) -> None:
        """Write `best`, the best checkpoints of a resumed run, to `best.json` again; only rank 0 calls it.

        Raises OSError. Others are recorded where the run was killed before it recorded these, or goes on from
        before later ones. Without a checkpoint of the first nothing is changed.
        """
        kept = self._complete(best)
        if kept and kept[0] == best[0] and best_checkpoints(self._folder) != kept:
            mark_best(self._folder, kept, self._disk)

    def _complete(self, best: Sequence[BestCheckpoint]) -> list[BestCheckpoint]:
        """Return the entries of `best` whose checkpoint is complete."""
        return [one for one in best if complete_version(self._folder / checkpoint_name(one.step)) is not None]

    def _rename_later(self) -> None:
        if self.start_step is not None:
            rename_later(self._folder, self.start_step, self._disk)
        self.start_step = None

    def _after_commit(self, step: int, best: Sequence[BestCheckpoint] | None) -> None:
        if best is not None:
            mark_best(self._folder, self._complete(best), self._disk)
        prune(self._folder, step, **self._keep, disk=self._disk)
