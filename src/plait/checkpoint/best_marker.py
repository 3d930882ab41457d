"""`best.json` in a folder of checkpoints: which of them had the lowest validation losses.

A file, not a link, since not every file system has links; it is replaced atomically. `FOLDER/best` names the
one with the lowest loss wherever the path of a checkpoint is expected.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plait.checkpoint.disk import Disk, write_text
from plait.files import read_json

BEST = "best"
"""The name of the best checkpoint in its folder."""


class BestCheckpoint(NamedTuple):
    """A checkpoint that is kept because its validation loss is among the lowest."""

    step: int
    loss: float


def with_new_best(kept: Sequence[BestCheckpoint], new: BestCheckpoint, most: int) -> list[BestCheckpoint]:
    """Return the `most` checkpoints with the lowest losses of `kept` and `new`, the lowest first.

    Of equal losses the earlier one counts as lower.
    """
    others = [one for one in kept if one.step != new.step]
    return sorted([*others, new], key=lambda one: (one.loss, one.step))[:most]


def marker_path(folder: Path) -> Path:
    """Return the path of the marker in a folder of checkpoints."""
    return folder / f"{BEST}.json"


def mark_best(folder: Path, kept: Sequence[BestCheckpoint], disk: Disk) -> None:
    """Write `kept`, lowest loss first, to `best.json` in `folder`; if `kept` is empty, remove the file.

    Raises OSError.
    """
    path = marker_path(folder)
    unfinished = path.with_name(f"{path.name}.part")
    if os.path.lexists(unfinished):  # left by a process that was killed
        disk.remove(unfinished)
    if kept:
        best, *others = ({"step": one.step, "validation_loss": one.loss} for one in kept)
        write_text(disk, path, json.dumps(best | ({"others": others} if others else {})) + "\n")
    elif path.exists():
        disk.remove(path)
    disk.sync_folder(folder)  # before an older best checkpoint is removed


def best_checkpoints(folder: Path) -> list[BestCheckpoint]:
    """Return the checkpoints of `folder` that are recorded as the best, the lowest loss first.

    A damaged record counts as none. Raises OSError.
    """
    try:
        read = read_json(marker_path(folder))
        found = [_checked(one) for one in (read, *read.get("others", ()))]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return found


def best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint in `folder`; None where none is recorded. Raises OSError."""
    return next((one.step for one in best_checkpoints(folder)), None)


def _checked(read: Any) -> BestCheckpoint:
    """Return an entry of `best.json`, checked. Raises ValueError, KeyError or TypeError for other values."""
    step, loss = read["step"], read.get("validation_loss", math.nan)
    if type(step) is not int or step < 0 or not isinstance(loss, int | float):
        raise ValueError("no number of steps")
    return BestCheckpoint(step, float(loss))
