"""Folders of checkpoints: what they are called, which are complete, which is the newest, which may go.

step-00000200/            a checkpoint: complete, or it would not be called so
.step-00000300.saving/    one that is being written, or that nobody finished
.step-00000200.replaced/  an older one of the same name, until the new one stands in its place
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from plait.checkpoint.disk import Disk
from plait.checkpoint.manifest import FILE, is_complete
from plait.errors import CheckpointError

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.(step-\d+)\.(saving|replaced|removed)")


def folder_of(step: int) -> str:
    """What the checkpoint after `step` steps is called."""
    return f"step-{step:08d}"


def saving(path: Path) -> Path:
    """Where a checkpoint is written before it is one."""
    return path.with_name(f".{path.name}.saving")


def replaced(path: Path) -> Path:
    """Where one of the same name waits until the new one stands in its place."""
    return path.with_name(f".{path.name}.replaced")


def put_in_place(path: Path, disk: Disk) -> None:
    """Let what was written at `saving(path)` be the checkpoint at `path`. OSError.

    Whenever this is interrupted, `standing(path)` is a complete one.
    """
    if path.exists():
        if replaced(path).exists():
            disk.remove(replaced(path))
        disk.rename(path, replaced(path))
    disk.rename(saving(path), path)
    disk.sync_folder(path.parent)


def discard(folder: Path, path: Path, disk: Disk) -> None:
    """Remove a folder that stands for the checkpoint `path`: at once it is gone, then its files. OSError."""
    gone = path.with_name(f".{path.name}.removed")
    if gone.exists():
        disk.remove(gone)
    disk.rename(folder, gone)
    disk.remove(gone)


def remove_replaced(path: Path, disk: Disk) -> None:
    """Remove what stood at `path` before. OSError."""
    if replaced(path).exists():
        disk.remove(replaced(path))


def standing(path: Path) -> Path | None:
    """The newest checkpoint of that name that was complete, wherever it waits; None: there is none.

    What has its name was complete, or it would not have it: whether it still is, `read` says.
    """
    if path.exists():
        return path if (path / FILE).is_file() else None
    return next((place for place in (saving(path), replaced(path)) if is_complete(place)), None)


def series(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a folder and after how many steps, newest first."""
    names: set[str] = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        left = _LEFT.fullmatch(entry.name)
        if left is not None or _NAME.fullmatch(entry.name):
            names.add(left[1] if left else entry.name)
    found = [(int(name.partition("-")[2]), standing(folder / name)) for name in names]
    return sorted(((step, path) for step, path in found if path is not None), reverse=True)


def resolve(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest one in it. CheckpointError where there is none."""
    found = standing(path)
    if found is not None:
        return found
    within = series(path)
    if within:
        return within[0][1]
    what = "is no folder" if not path.is_dir() else "holds no complete checkpoint"
    raise CheckpointError(
        f"{path} {what}: give the folder of a checkpoint, or one with step-… folders in it."
    )


def older(path: Path) -> Path | None:
    """The newest complete checkpoint beside `path` that was written before it, if there is one."""
    name = _NAME.search(path.name)
    if name is None:
        return None
    with suppress(OSError):  # who asks has something worse to tell
        return next((place for step, place in series(path.parent) if step < int(name[1])), None)
    return None


def set_aside(folder: Path, behind: int, disk: Disk) -> None:
    """Give checkpoints of more than `behind` steps other names: the run that goes on there is not theirs."""
    for step, path in series(folder):
        if step > behind and path.name == folder_of(step):  # the one that is being written has no name yet
            free = (folder / f"{folder_of(step)}.aside-{number}" for number in count(1))
            disk.rename(path, next(name for name in free if not name.exists()))


def bring_back(path: Path, disk: Disk) -> None:
    """Let the checkpoint that stands for `path` have that name, where it was interrupted before. OSError."""
    stands = None if path.exists() else standing(path)
    if stands is not None:
        disk.rename(stands, path)


def tidy(folder: Path, disk: Disk) -> None:
    """Put complete checkpoints in their places, and remove what nobody finished, as far as that can be done.

    Not while one is being written. OSError where a checkpoint cannot get its name back.
    """
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        found = _LEFT.fullmatch(entry.name)
        if found is None:
            continue
        if found[2] != "removed":
            bring_back(folder / found[1], disk)
        if entry.exists():
            with suppress(OSError):  # it is in nobody's way
                disk.remove(entry)


def prune(folder: Path, newest: int, *, keep_last: int, keep_every: int, disk: Disk) -> None:
    """Remove all checkpoints but the newest `keep_last` and those of every `keep_every` steps; 0: none such.

    Those of more steps than `newest`, which has just been written, are another run's: they are not counted,
    and stay. With `keep_last` 0 all stay. OSError.
    """
    own = [(step, path) for step, path in series(folder) if step <= newest]
    for step, path in own[keep_last:] if keep_last else ():
        if not (keep_every and step % keep_every == 0):
            discard(path, folder / folder_of(step), disk)
