"""Folders of checkpoints: names, complete ones, atomic creation, removal of old ones, and which are the best.

step-00000200/            a complete checkpoint
.step-00000300.saving/    a checkpoint that is being written, or that was interrupted
.step-00000200.replaced/  an older checkpoint of the same name, until the new one has that name
step-00000200.aside-1/    one of another run; .damaged-1: without its manifest; .wrong-bits-1: withdrawn
best.json                 which checkpoints had the lowest validation losses: see `mark_best`

A file, not a link, since not every file system has links; it is replaced atomically. `FOLDER/best` names the
one with the lowest loss wherever the path of a checkpoint is expected.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from plait.checkpoint.file_system_calls import Disk, write_text
from plait.checkpoint.manifest import FILE, Manifest, is_complete, manifest_text
from plait.errors import CheckpointError
from plait.files import open_file, read_json

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
    """Return the path of `best.json`, which records the best checkpoints in a folder."""
    return folder / f"{BEST}.json"


def mark_best(folder: Path, kept: Sequence[BestCheckpoint], disk: Disk) -> None:
    """Write `kept`, lowest loss first, to `best.json`, or remove it where there are none. Raises OSError."""
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
    """Return the best checkpoints that `best.json` in `folder` lists, lowest loss first; [] if it is damaged.

    Also [] where there is no such file. Raises OSError where it cannot be read.
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


_NAME = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(step-\d+)\.(saving|replaced|removed)")


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def unfinished_path(path: Path) -> Path:
    """Return the folder in which the checkpoint `path` is written before it is complete."""
    return path.with_name(f".{path.name}.saving")


def replaced_path(path: Path) -> Path:
    """Return the folder that keeps an older checkpoint of the same name until the new one is in place."""
    return path.with_name(f".{path.name}.replaced")


def write_manifest(folder: Path, manifest: Manifest, disk: Disk) -> None:
    """Write the manifest of a checkpoint to the folder that holds its files. Raises OSError.

    A manifest makes a folder complete: the names of the files are on the disk before it, and its own after.
    """
    disk.sync_folder(folder)
    write_text(disk, folder / FILE, manifest_text(manifest))
    disk.sync_folder(folder)


def move_into_place(path: Path, disk: Disk) -> None:
    """Rename `unfinished_path(path)` to `path`; an older checkpoint there gets a hidden name. Raises OSError.

    If this is interrupted at any point, `complete_version(path)` still finds a complete checkpoint.
    """
    if path.exists():
        remove_replaced(path, disk)
        disk.rename(path, replaced_path(path))
    disk.rename(unfinished_path(path), path)
    disk.sync_folder(path.parent)


def discard(folder: Path, path: Path, disk: Disk) -> None:
    """Remove `folder`, a version of checkpoint `path`: rename it, then delete its files. Raises OSError."""
    removed = path.with_name(f".{path.name}.removed")
    if removed.exists():
        disk.remove(removed)
    disk.rename(folder, removed)
    disk.remove(removed)


def remove_replaced(path: Path, disk: Disk) -> None:
    """Remove the older checkpoint that was replaced by `path`. Raises OSError."""
    if replaced_path(path).exists():
        disk.remove(replaced_path(path))


@contextmanager
def atomic_folder(path: Path, disk: Disk) -> Iterator[Path]:
    """Context: yield a hidden folder to write in, and rename it to `path` at the end if no error was raised.

    Raises `CheckpointError` where `path` is taken and for an OSError; after an error nothing is left.
    """
    path = path.absolute()
    is_empty_folder = path.is_dir() and not any(path.iterdir())
    if complete_version(path) is not None or (path.exists() and not is_empty_folder):
        raise CheckpointError(f"{path} is there already: choose a path that is free.")
    hidden = unfinished_path(path)
    try:
        if hidden.exists():
            disk.remove(hidden)
        disk.make_folder(hidden)
        yield hidden
        _sync_all(hidden, disk)
        move_into_place(path, disk)
        remove_replaced(path, disk)
    except BaseException as error:
        with suppress(OSError):  # the first error is raised
            if hidden.exists():
                disk.remove(hidden)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{path} was not written ({error.strerror or error}): make room, or choose another path."
        ) from None


def _sync_all(folder: Path, disk: Disk) -> None:
    """Block until a folder is on the disk with all that it holds, which libraries may have written."""
    for inner, _, names in os.walk(folder):
        for name in names:
            with open_file(Path(inner, name)) as file:
                disk.sync(file)
        disk.sync_folder(Path(inner))


def complete_version(path: Path) -> Path | None:
    """Return the folder, hidden or not, with the newest complete version of the checkpoint `path`, or None.

    A folder that has its final name was complete when it got it; `read_manifest` finds later damage.
    """
    if path.exists():
        return path if (path / FILE).is_file() else None
    return next(
        (folder for folder in (unfinished_path(path), replaced_path(path)) if is_complete(folder)), None
    )


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints in a folder, each with its number of steps, newest first."""
    return [(step, path) for step, path in all_checkpoints(folder) if (path / FILE).is_file()]


def all_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder, newest first: complete ones, and those that lost their manifest."""
    names: set[str] = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is not None or _NAME.fullmatch(entry.name):
            names.add(hidden[1] if hidden else entry.name)
    paths = ((folder / name, complete_version(folder / name)) for name in names)
    found = ((path, path if version is None and path.is_dir() else version) for path, version in paths)
    steps = ((int(path.name.partition("-")[2]), version) for path, version in found if version is not None)
    return sorted(steps, reverse=True)


def resolve(path: Path) -> Path:
    """Return the checkpoint folder `path`, or the newest in it; for FOLDER/best the best one in FOLDER.

    Raises CheckpointError if there is none, or `path` has lost its manifest.
    """
    path = _best_checkpoint(path.parent) if path.name == BEST and not path.exists() else path
    found = complete_version(path)
    if found is not None:
        return found
    within = complete_checkpoints(path)
    if within:
        return within[0][1]
    if path.is_dir() and _NAME.fullmatch(path.name):  # named when it was complete
        raise damaged(path, f"it has no {FILE}")
    what = "is no folder" if not path.is_dir() else "holds no complete checkpoint"
    of_run = [inner for _, inner in complete_checkpoints(path / "checkpoints")]
    remedy = "give the folder of a checkpoint, or one with step-… folders in it"
    if of_run:  # the folder of a run of plait train
        remedy = f"give {path / 'checkpoints'}, which does"
    raise CheckpointError(f"{path} {what}: {remedy}.")


def _best_checkpoint(folder: Path) -> Path:
    """Return the path of the best checkpoint in `folder`. Raises CheckpointError where none is recorded."""
    try:
        step = best_step(folder)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{marker_path(folder)} {reason}: give the folder of a checkpoint.") from None
    if step is None:
        raise CheckpointError(
            f"{folder} records no best checkpoint in {marker_path(folder).name}: give the folder of a "
            "checkpoint, or train with run.keep_best."
        )
    return folder / checkpoint_name(step)


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a damaged checkpoint, which names the newest complete one with fewer steps."""
    previous: Path | None = None
    if (name := _NAME.search(path.name)) is not None:
        with suppress(OSError):  # the damage is more important
            before = (other for step, other in complete_checkpoints(path.parent) if step < int(name[1]))
            previous = next(before, None)
    remedy = f"load {previous}, the one before it" if previous else "take another checkpoint"
    return CheckpointError(f"the checkpoint {path} is damaged: {reason}: {remedy}.", damaged=True)


def rename_later(folder: Path, start: int, disk: Disk) -> None:
    """Rename checkpoints of more than `start` steps, left by another run, to a free name, `NAME.aside-N`.

    Best checkpoints among them are no longer recorded as such.
    """
    best = best_checkpoints(folder)
    own = [one for one in best if one.step <= start]
    if own != best:
        mark_best(folder, own, disk)
    for step, path in complete_checkpoints(folder):
        name = checkpoint_name(step)
        if step > start and path.name == name:  # the checkpoint that is being written has a hidden name
            disk.rename(path, _free_name(path, "aside"))


def withdraw(folder: Path, steps: Collection[int], disk: Disk) -> list[Path]:
    """Rename the checkpoints of `steps`, whose bits may be wrong, to free names, `NAME.wrong-bits-N`.

    Return the new paths; best checkpoints among them are no longer recorded as such. Several ranks may do so
    at once: each returns those that it has renamed. Raises OSError.
    """
    best = best_checkpoints(folder)
    right = [one for one in best if one.step not in steps]
    if right != best:
        mark_best(folder, right, disk)
    renamed = []
    for step, path in all_checkpoints(folder):
        if step in steps:
            free = _free_name(folder / checkpoint_name(step), "wrong-bits")
            with suppress(FileNotFoundError):  # another rank has done it
                disk.rename(path, free)
                renamed.append(free)
    return renamed


def _free_name(path: Path, ending: str) -> Path:
    """Return the first of `NAME.ENDING-1`, `NAME.ENDING-2`, … beside `path` that is free."""
    names = (path.with_name(f"{path.name}.{ending}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def restore_name(path: Path, disk: Disk) -> None:
    """If an interruption left checkpoint `path` complete, but hidden, rename it to `path`. Raises OSError."""
    version = None if path.exists() else complete_version(path)
    if version is not None:
        disk.rename(version, path)


def clean_up(folder: Path, disk: Disk) -> None:
    """Rename hidden complete checkpoints to their names, and remove interrupted ones as far as possible.

    Checkpoints that lost their manifest make room: they are renamed to `NAME.damaged-N`. Must not run while a
    checkpoint is being written. Raises OSError where a name cannot be restored.
    """
    for _, path in all_checkpoints(folder):
        if not (path / FILE).is_file():
            disk.rename(path, _free_name(path, "damaged"))
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is None:
            continue
        if hidden[2] != "removed":
            restore_name(folder / hidden[1], disk)
        if entry.exists():
            with suppress(OSError):  # a leftover folder does no harm
                disk.remove(entry)


def prune(folder: Path, newest: int, *, keep_last: int, keep_every: int, disk: Disk) -> None:
    """Remove checkpoints except the newest `keep_last` (0: all), multiples of `keep_every`, and the best.

    `newest`: steps of the checkpoint that was just written. Checkpoints of more steps belong to another run:
    they are not counted, and stay. With `keep_last` 0 all stay, with `keep_every` 0 none by its step. Raises
    OSError.
    """
    best = {one.step for one in best_checkpoints(folder)}
    own = [(step, path) for step, path in complete_checkpoints(folder) if step <= newest]
    for step, path in own[keep_last:] if keep_last else ():
        if step not in best and not (keep_every and step % keep_every == 0):
            discard(path, folder / checkpoint_name(step), disk)
