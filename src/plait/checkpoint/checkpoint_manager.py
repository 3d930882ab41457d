"""The checkpoints of a run: one after another in a folder, written in the background, old ones removed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import checkpoint_name, clean_up, prune, rename_later
from plait.checkpoint.rank_contents import Checkpointable
from plait.checkpoint.save_task import PendingSave
from plait.checkpoint.saving import start
from plait.checkpoint.staging import Staging


class CheckpointManager:
    """Saves a run every now and then; at most one checkpoint is being written at a time.

    All ranks make one, and call its methods alike. A failure leaves the older checkpoints as they are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        behind: int | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Keep the newest `keep_last` (0: all), and those whose number of steps `keep_every` divides.

        Before the first is written rank 0 removes what was left half done. `behind`: how many steps the run
        had behind it when it began; checkpoints of more steps are then not of this run, and get other names
        when its first is complete. None: they are.
        """
        self._folder = folder
        self._behind = behind
        self._begun = False
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._disk = disk or Disk()
        self._staging = Staging()
        self._under_way: PendingSave | None = None
        self.complete = True
        """Whether the last one that was waited for is there, even if older ones could not be removed."""

    @property
    def flaw(self) -> str:
        """On rank 0: why what is under way has failed, as soon as that is known; else empty."""
        return "" if self._under_way is None else self._under_way.flaw

    @property
    def staged_bytes(self) -> int:
        """How much memory the copies take that are made for writing in the background."""
        return self._staging.bytes

    def save(
        self,
        engine: Checkpointable,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        state: Mapping[str, Any],
    ) -> None:
        """Save the run after `step` steps; returns when there are copies, and the next step may begin.

        Waits for the one before to be complete, see `finish`. Raises `CheckpointError` on all ranks.
        """
        self.finish()
        self.complete = False
        path = self._folder / checkpoint_name(step)
        self._under_way = start(
            engine,
            optimizer,
            path,
            state,
            self._staging,
            disk=self._disk,
            first=self._tidy,
            before=self._set_aside,
            after=partial(prune, self._folder, step, **self._keep, disk=self._disk),
        )

    def finish(self) -> None:
        """Return when nothing is under way. Raises `CheckpointError`, on all ranks, where it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            try:
                under_way.wait()
            finally:
                self.complete = under_way.complete

    def _tidy(self) -> None:
        if not self._begun:
            clean_up(self._folder, self._disk)
        self._begun = True

    def _set_aside(self) -> None:
        if self._behind is not None:
            rename_later(self._folder, self._behind, self._disk)
        self._behind = None
