"""The protocol by which ranks write a checkpoint; they exchange all information through the shared folder.

    rank 0       makes the folder .NAME.saving
    each rank    writes rank-00003.safetensors, then its part of the manifest, rank-00003.json
    rank 0       waits for the parts of all ranks, writes the manifest, renames the folder to NAME

Until the folder has its name, there is no such checkpoint. Since no collectives are needed, the ranks can
write in the background. A rank that fails writes its error to rank-00003.failed; rank 0 then removes the
folder, which ends the work of the other ranks. So all ranks finish at about the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from plait.checkpoint.file_system_calls import Disk, write_text
from plait.checkpoint.folders import (
    discard,
    move_into_place,
    remove_replaced,
    unfinished_path,
    write_manifest,
)
from plait.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from plait.checkpoint.optimizer_state import merge_optimizers
from plait.checkpoint.tensor_file import BoxToWrite, write_file
from plait.errors import CheckpointError
from plait.files import adapter_of
from plait.ranks.launch.rank_threads import join_thread, sleep
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import all_gather_text

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two looks at the folder, growing with time
_NONE, _NOT_REMOVED, _ABANDONED, _FAILED = "0123"
"""Severity of a rank's error: none, older checkpoints remain, another rank failed, this rank failed."""


class _AbandonedError(Exception):
    """This rank stopped writing because another one failed or made no progress."""


@dataclass(frozen=True)
class ManifestPart:
    """The part of a manifest that one rank contributes."""

    tensors: Mapping[str, TensorEntry]
    """All tensors of which the rank holds a shard."""
    optimizer: Mapping[str, Any] | None = None
    file: FileEntry | None = None
    """The rank's file; None until it is written."""


def merge_parts(head: Manifest, parts: Sequence[ManifestPart]) -> Manifest:
    """Return the manifest `head` with the tensors, files and optimizer listed in the ranks' `parts`."""
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        tensors |= part.tensors
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    optimizer = merge_optimizers(optimizers)[0] if optimizers else None
    files = tuple(part.file for part in parts if part.file is not None)
    return replace(head, tensors=tensors, files=files, optimizer=optimizer)


@dataclass(frozen=True)
class SaveTask:
    """All that a rank needs to write its share of a checkpoint: path, boxes, manifest, callbacks."""

    path: Path
    mesh: Mesh
    items: Sequence[BoxToWrite]
    part: ManifestPart
    """This rank's part of the manifest, without its file."""
    head: Manifest
    """The manifest without tensors and files."""
    disk: Disk
    before_commit: Callable[[], None] = lambda: None
    """Called by rank 0 when the checkpoint is complete, before it gets its name."""
    after_commit: Callable[[], None] = lambda: None
    """Called by rank 0 when it has its name."""

    @property
    def timeout(self) -> float:
        """Seconds without change in the folder after which a rank gives up: half the collectives' timeout."""
        return self.mesh.timeout / 2


class PendingSave:
    """Handle of a checkpoint that is being written; `wait` blocks until it is complete."""

    def __init__(self, task: SaveTask, *, background: bool) -> None:
        self._task = task
        self.error = ""
        """The error message so far: on rank 0 that of any rank, on another rank only its own."""
        self._severity = _NONE
        self.complete = False
        """Whether the checkpoint is complete; set by `wait`."""
        self._thread = Thread(target=self._run, name="plait-checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def wait(self) -> None:
        """Block until the checkpoint is complete. All ranks call it, once.

        Raises `CheckpointError` on every rank where one could not write (then there is no such checkpoint),
        or older checkpoints could not be removed.
        Communication: an all-reduce of 8 bytes over `world`, and the error messages if there are any.
        """
        if self._thread is not None:
            join_thread(self._thread)
        own = f"{self._severity}{self.error}" if self.error else ""
        mesh = self._task.mesh
        errors = filter(None, all_gather_text(own, mesh.group("world"), mesh.device))
        worst = max(errors, key=lambda error: error[0], default=_NONE)
        self.complete = worst[0] in (_NONE, _NOT_REMOVED)
        if worst[1:]:
            raise CheckpointError(worst[1:])

    def has_ended(self, seconds: float) -> bool:
        """Block until this rank has ended its part, at most `seconds`; return whether it has."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive():
            if time.monotonic() > until:
                return False
            sleep(_FIRST_PAUSE)
        return True

    def _run(self) -> None:
        task = self._task
        try:
            write_rank_file(task)
            if task.mesh.rank == 0:
                commit(task)
            elif not _wait_until(lambda: not unfinished_path(task.path).exists(), task):
                raise _stalled("0", task)
        except Exception as raised:  # any error: the other ranks wait for the folder to change
            message = _message(raised, task.mesh.rank)
            _abandon(task, message)
            self._severity = _ABANDONED if isinstance(raised, _AbandonedError) else _FAILED
            self.error = (
                f"the checkpoint {task.path} was not written ({message}): make room, or choose another "
                "folder; older checkpoints are as they were."
            )
            return
        if task.mesh.rank == 0:
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove older checkpoints; an error does not affect the new one."""
        try:
            remove_replaced(self._task.path, self._task.disk)
            self._task.after_commit()
        except OSError as error:
            self._severity = _NOT_REMOVED
            self.error = (
                f"the checkpoint {self._task.path} is complete, but older ones cannot be removed "
                f"({_message(error, self._task.mesh.rank)}): remove them by hand, or choose another folder."
            )


def wait_for_folder(folder: Path, timeout: float) -> bool:
    """Block until this host sees a folder that rank 0 has just made; return False after `timeout` seconds."""
    until = time.monotonic() + timeout
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        sleep(_FIRST_PAUSE)
    return True


def write_rank_file(task: SaveTask) -> None:
    """Write this rank's file and manifest part. Raises OSError; _AbandonedError if the folder is gone."""
    folder = unfinished_path(task.path)
    try:
        file = write_file(folder / file_name(task.mesh.rank), task.items, task.disk)
        part = replace(task.part, file=file)
        write_text(task.disk, folder / f"{_stem(task.mesh.rank)}.json", json.dumps(part, default=vars))
    except FileNotFoundError:
        if folder.is_dir():
            raise
        raise _AbandonedError(f"rank {task.mesh.rank} stopped, since {folder} was removed") from None


def commit(task: SaveTask) -> None:
    """On rank 0, wait for the files of all ranks, write the manifest, and give the folder its final name.

    Raises OSError; _AbandonedError if another rank failed or made no progress.
    """
    folder = unfinished_path(task.path)
    parts = [folder / f"{_stem(rank)}.json" for rank in range(task.mesh.world)]

    def failure() -> str:
        return next((path.read_text() for path in sorted(folder.glob("*.failed"))), "")

    if not _wait_until(lambda: all(path.exists() for path in parts) or bool(failure()), task):
        missing = [str(rank) for rank, path in enumerate(parts) if not path.exists()]
        raise _stalled(", ".join(missing), task)
    if failure():
        raise _AbandonedError(failure())
    read = adapter_of(ManifestPart).validate_json
    manifest = merge_parts(task.head, [read(path.read_text()) for path in parts])
    for path in parts:
        task.disk.remove(path)
    write_manifest(folder, manifest, task.disk)
    task.before_commit()
    move_into_place(task.path, task.disk)


def _stalled(ranks: str, task: SaveTask) -> _AbandonedError:
    return _AbandonedError(f"rank {ranks} has written nothing for {task.timeout:g} s and is not done")


def _wait_until(done: Callable[[], bool], task: SaveTask) -> bool:
    """Block until `done()`; return False if the unfinished folder does not change for `timeout` seconds."""
    began = changed = looked = time.monotonic()
    last_size = -1
    while not done():
        now = time.monotonic()
        if last_size < 0 or now - looked > task.timeout / 10:  # seldom: every rank lists the files of all
            size, looked = _folder_size(unfinished_path(task.path)), now
            if size != last_size:
                last_size, changed = size, now
            elif now - changed > task.timeout:
                return done()
        sleep(min(_FIRST_PAUSE + (now - began) / 10, _LONGEST_PAUSE))
    return True


def _folder_size(folder: Path) -> int:
    """Return the number of files in a folder plus their bytes; 0 if the folder does not exist."""
    try:
        return sum(1 + entry.stat().st_size for entry in folder.iterdir())
    except OSError:
        return 0


def _abandon(task: SaveTask, message: str) -> None:
    """Rank 0: remove the unfinished folder. Others: report the error to rank 0 and wait for the removal."""
    folder = unfinished_path(task.path)
    with suppress(OSError):  # the first error is reported
        if task.mesh.rank == 0:
            discard(folder, task.path, task.disk)
        elif folder.is_dir():
            (folder / file_name(task.mesh.rank)).unlink(missing_ok=True)  # makes room for the message
            write_text(task.disk, folder / f"{_stem(task.mesh.rank)}.failed", message)
    if task.mesh.rank != 0:
        _wait_until(lambda: not folder.exists(), task)


def _message(error: Exception, rank: int) -> str:
    if isinstance(error, OSError):
        return f"rank {rank}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, _AbandonedError) else f"rank {rank}: {error!r}"


def file_name(rank: int) -> str:
    """Return the name of the safetensors file that `rank` writes."""
    return f"{_stem(rank)}.safetensors"


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"
