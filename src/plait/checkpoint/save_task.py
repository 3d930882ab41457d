"""Writing: every rank writes a file of its own, and rank 0 makes a checkpoint of them.

    rank 0       makes the folder .NAME.saving
    each rank    writes rank-00003.safetensors, then rank-00003.json, what it has written
    rank 0       waits for those of all ranks, writes the manifest, renames the folder to NAME

Until the folder has its name there is no such checkpoint. While files are written the ranks do not talk to
each other: so it can be done in the background, and what they know of each other is in the folder, which has
to be one that all of them see. A rank that fails leaves a word there, rank-00003.failed, and rank 0 removes
the folder; that it is gone is what ends the others' work. So all are done at about the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.folders import discard, move_into_place, remove_replaced, unfinished_path
from plait.checkpoint.manifest import (
    FILE,
    Manifest,
    ManifestPart,
    manifest_part_from_text,
    manifest_text,
    merged,
)
from plait.checkpoint.tensor_file import BoxToWrite, write_file
from plait.comm.mesh import Mesh
from plait.comm.rank_threads import join_thread, sleep
from plait.comm.text import all_gather_text
from plait.errors import CheckpointError

_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0  # seconds between two looks at the folder: more, the longer it takes


_NONE, _OLDER, _IN_VAIN, _FAILED = "0123"
"""How much a rank has to tell: nothing, of older checkpoints, of what others did, of what it met itself."""


class _InVainError(Exception):
    """This rank has not failed: another one did, or does not go on."""


@dataclass(frozen=True)
class SaveTask:
    """What one rank does for a checkpoint."""

    path: Path
    rank: int
    ranks: int
    items: Sequence[BoxToWrite]
    share: ManifestPart
    """What is told of this rank's part, but for its file."""
    head: Manifest
    """The manifest, but for tensors and files."""
    disk: Disk
    patience: float
    """Seconds in which something has to happen in the folder."""
    before: Callable[[], None] = lambda: None
    """Done by rank 0 when the new checkpoint is complete, right before it gets its name."""
    after: Callable[[], None] = lambda: None
    """Done by rank 0 when it has it."""


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, work: SaveTask, mesh: Mesh, *, background: bool) -> None:
        self._work = work
        self._mesh = mesh
        self._flaw = ""
        self._weight = _NONE
        self.complete = False
        """Whether there is such a checkpoint, as `wait` has learnt."""
        self._thread = Thread(target=self._run, name="plait-checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    @property
    def flaw(self) -> str:
        """What this rank knows of a failure, before anybody waits; rank 0 hears of all."""
        return self._flaw

    def wait(self) -> None:
        """Return when the checkpoint is complete. All ranks call it, once.

        Raises `CheckpointError` on every rank where any could not write; then there is no such checkpoint.
        Also where older ones could not be removed.
        Communication: an all-reduce of 8 bytes over `world`, and where something failed what did.
        """
        if self._thread is not None:
            join_thread(self._thread)
        own = f"{self._weight}{self._flaw}" if self._flaw else ""
        told = all_gather_text(own, self._mesh.group("world"), self._mesh.device)
        worst = max((flaw for flaw in told if flaw), key=lambda flaw: flaw[0], default=f"{_NONE}")
        self.complete = worst[0] in (_NONE, _OLDER)
        if worst[1:]:
            raise CheckpointError(worst[1:])

    def _run(self) -> None:
        work = self._work
        try:
            write_share(work)
            if work.rank == 0:
                commit(work)
            else:
                _await_end(work)
        except Exception as error:  # whatever it is, the others wait to hear of it
            told = _told(error, work.rank)
            _give_up(work, told)
            self._weight = _IN_VAIN if isinstance(error, _InVainError) else _FAILED
            self._flaw = (
                f"the checkpoint {work.path} was not written ({told}): make room, or choose another "
                "folder; older checkpoints are as they were."
            )
            return
        if work.rank == 0:
            self._tidy_up()

    def _tidy_up(self) -> None:
        """What is no longer needed goes; the checkpoint is there, whatever happens to these."""
        try:
            remove_replaced(self._work.path, self._work.disk)
            self._work.after()
        except OSError as error:
            self._weight = _OLDER
            self._flaw = (
                f"the checkpoint {self._work.path} is complete, but older ones cannot be removed "
                f"({_told(error, self._work.rank)}): remove them by hand, or choose another folder."
            )


def sees(folder: Path, patience: float) -> bool:
    """Whether a folder that rank 0 has just made is there; on a network it may take a while."""
    until = time.monotonic() + patience
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        sleep(_FIRST_LOOK)
    return True


def write_share(work: SaveTask) -> None:
    """Write this rank's file, and what is in it. OSError; in vain where the folder goes away meanwhile."""
    folder = unfinished_path(work.path)
    try:
        file = write_file(folder / file_name(work.rank), work.items, work.disk)
        write_text(work.disk, folder / f"{_name(work.rank)}.json", work.share.with_file(file).as_text())
    except FileNotFoundError:
        if folder.is_dir():
            raise
        raise _InVainError(f"rank {work.rank} stopped, since {folder} was removed") from None


def commit(work: SaveTask) -> None:
    """Make a checkpoint of what all ranks have written. OSError; in vain for a rank that failed."""
    folder = unfinished_path(work.path)
    shares = [folder / f"{_name(rank)}.json" for rank in range(work.ranks)]

    def failed() -> str:
        return next((path.read_text() for path in sorted(folder.glob("*.failed"))), "")

    if not _patient(folder, lambda: all(path.exists() for path in shares) or bool(failed()), work.patience):
        missing = [str(rank) for rank, path in enumerate(shares) if not path.exists()]
        raise _late(", ".join(missing), work)
    if failed():
        raise _InVainError(failed())
    manifest = merged(work.head, [manifest_part_from_text(path.read_text()) for path in shares])
    for path in shares:
        work.disk.remove(path)
    write_text(work.disk, folder / FILE, manifest_text(manifest))
    work.disk.sync_folder(folder)
    work.before()
    move_into_place(work.path, work.disk)


def _await_end(work: SaveTask) -> None:
    """Return when rank 0 has made a checkpoint of the folder, or given up."""
    folder = unfinished_path(work.path)
    if not _patient(folder, lambda: not folder.exists(), work.patience):
        raise _late("0", work)


def _late(ranks: str, work: SaveTask) -> _InVainError:
    return _InVainError(f"rank {ranks} has written nothing for {work.patience:g} s and is not done")


def _patient(folder: Path, done: Callable[[], bool], patience: float) -> bool:
    """Wait until `done`, as long as files in the folder come and grow at least every `patience` seconds."""
    began = since = looked = time.monotonic()
    seen = -1
    while not done():
        now = time.monotonic()
        if seen < 0 or now - looked > patience / 10:  # seldom: all ranks look at the files of all
            size, looked = _size(folder), now
            if size != seen:
                seen, since = size, now
            elif now - since > patience:
                return done()
        sleep(min(_FIRST_LOOK + (now - began) / 10, _LAST_LOOK))
    return True


def _size(folder: Path) -> int:
    """Files and bytes; 0 for a folder that goes away meanwhile."""
    try:
        return sum(1 + entry.stat().st_size for entry in folder.iterdir())
    except OSError:
        return 0


def _give_up(work: SaveTask, flaw: str) -> None:
    """Let rank 0 know; rank 0 removes what there is. What fails now is not told: the flaw is."""
    folder = unfinished_path(work.path)
    with suppress(OSError):
        if work.rank == 0:
            discard(folder, work.path, work.disk)
        elif folder.is_dir():
            (folder / file_name(work.rank)).unlink(missing_ok=True)  # room for a word
            write_text(work.disk, folder / f"{_name(work.rank)}.failed", flaw)
    if work.rank != 0:
        _patient(folder, lambda: not folder.exists(), work.patience)


def _told(error: Exception, rank: int) -> str:
    if isinstance(error, OSError):
        return f"rank {rank}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, _InVainError) else f"rank {rank}: {error!r}"


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"{_name(rank)}.safetensors"


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"
