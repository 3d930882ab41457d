"""`best.json` in a folder of checkpoints: which of them had the lowest validation loss.

A file, not a link, since not every file system has links; it is replaced atomically. `FOLDER/best` names that
checkpoint wherever the path of a checkpoint is expected.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from plait.checkpoint.disk import Disk, write_text
from plait.files import read_json

BEST = "best"
"""The name of the best checkpoint in its folder."""


def marker_path(folder: Path) -> Path:
    """Return the path of the marker in a folder of checkpoints."""
    return folder / f"{BEST}.json"


def mark_best(folder: Path, step: int, loss: float, disk: Disk) -> None:
    """Record the checkpoint of `step` as the best one in `folder`, with its validation loss.

    Raises OSError.
    """
    path = marker_path(folder)
    unfinished = path.with_name(f"{path.name}.part")
    if os.path.lexists(unfinished):  # left by a process that was killed
        disk.remove(unfinished)
    write_text(disk, path, json.dumps({"step": step, "validation_loss": loss}) + "\n")
    disk.sync_folder(folder)  # before an older best checkpoint is removed


def best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint in `folder`; None where none is recorded. Raises OSError."""
    try:
        step = read_json(marker_path(folder))["step"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 0 else None
