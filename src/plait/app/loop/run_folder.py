"""The folder of a run: a lock against a second writer, and the archiving of an earlier run's files."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from plait.app.loop.loggers import unwritable
from plait.errors import ConfigError
from plait.files import make_folder, owner_of, try_lock, unlock
from plait.pictures.report.metrics import EXPERTS_FILE, RANKS_FILE
from plait.pictures.report.page import REPORT_FILE
from plait.pictures.report.run_json import RUN_FILE
from plait.pictures.report.run_record import EVENTS_FILE, METRICS_FILE
from plait.pictures.report.step_json import STEP_FILE
from plait.ranks.mesh import GridMesh
from plait.ranks.text_collectives import broadcast_result

LOCK = "run.lock"
"""Names the process that writes to the folder of a run."""
EARLIER = "earlier"
"""The folder, in that of a run, that has one for each run which was there before: `1`, `2`, …"""
REPORT_FILES = (METRICS_FILE, RANKS_FILE, EXPERTS_FILE, RUN_FILE, EVENTS_FILE, STEP_FILE, REPORT_FILE)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}
"""What a file system without locks answers."""
_PATIENCE = 10.0
"""Seconds for the processes of a killed run to end, such as the workers of its `DataLoader`."""


@contextmanager
def locked_folder(
    folder: Path,
    lock: str,
    mesh: GridMesh,
    *,
    field: str = "",
    must_be_writable: bool = True,
    written: Sequence[str] = (),
) -> Iterator[None]:
    """Context in which rank 0 of `mesh` holds a lock on `folder`, by the file `lock`; all ranks enter it.

    Raises `ConfigError` on every rank where another run holds it, which is named, where a folder that
    `must_be_writable` is not, and where one of the files and folders `written` in it is a link: others may
    have made it, and it could lead anywhere. A killed run releases its locks; some file systems have none.
    Communication: two broadcasts, of 8 bytes and of a text.
    """
    held: list[tuple[Path, BinaryIO]] = []

    def take() -> str:
        for link in filter(Path.is_symlink, (folder / name for name in written)):
            raise ConfigError(f"{link} is a link, and a run writes through none: remove it.")
        file = _locked(folder, lock, field, must_be_writable=must_be_writable)
        held.extend([] if file is None else [(folder / lock, file)])
        return ""

    broadcast_result(take, ConfigError, mesh.group("world"), mesh.device)
    try:
        yield
    finally:
        for path, file in held:
            with suppress(OSError):
                unlock(path, file)


def _locked(folder: Path, lock: str, field: str, *, must_be_writable: bool) -> BinaryIO | None:
    """Return the lock, open, or None where there can be none. Raises `ConfigError` where it is held."""
    path, until = folder / lock, time.monotonic() + _PATIENCE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (file := try_lock(path)) is None:
            owner = owner_of(path)
            if time.monotonic() > until or not _has_ended(owner):
                place = f"{field} = {str(folder)!r}" if field else str(folder)
                raise ConfigError(
                    f"{place} is in use by another run, {owner}: give this one a folder of its own, or end "
                    "the other."
                )
            time.sleep(0.1)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        if not is_link and (error.errno in _NO_LOCKS or not must_be_writable):
            return None
        raise unwritable(folder, error, field) from None
    return file


def _has_ended(owner: str) -> bool:
    """Return whether the process that a lock names has ended, on this host; False where that is not known."""
    named = re.match(r"process (\d+) on (\S+)", owner)
    if named is None or named[2] != socket.gethostname():
        return False
    try:
        os.kill(int(named[1]), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def set_aside(folder: Path, names: Sequence[str] = REPORT_FILES) -> Path | None:
    """Move the files of an earlier run in `folder` to a new folder such as `earlier/1`; return that, or None.

    `names`: of its files and folders. None where no run has written metrics there; then files that one has
    left are removed. Raises OSError.
    """
    present = [folder / name for name in names if os.path.lexists(folder / name)]
    metrics = folder / METRICS_FILE
    if not metrics.is_file() or metrics.stat().st_size == 0:
        for path in present:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
        return None
    make_folder(folder / EARLIER)
    kept = next(path for number in count(1) if not os.path.lexists(path := folder / EARLIER / str(number)))
    make_folder(kept)
    for path in present:
        path.rename(kept / path.name)
    return kept


def set_aside_line(kept: Path) -> str:
    """Return a sentence that says in which folder the earlier run's files are."""
    return f"The files of the run before are in {kept}."
