"""`run_folder`: a temporary folder for the files of one run; a later run removes it after a kill."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from plait.files import try_lock

_PREFIX, _LOCK = "plait-ranks-", "launch.lock"
"""Names that no folder of a user has: that of a run has `run.lock`. The lock is held as long as the process
that made the folder lives."""


@contextmanager
def run_folder() -> Iterator[str]:
    """Context: yield the path of a new temporary folder, which is removed at the end.

    Before, remove those that killed processes of this user have left.
    """
    _remove_left()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        with suppress(OSError):  # a file system without locks, whose folders are not removed later
            unlocked = Path(folder, f"{_LOCK}.part")
            lock = try_lock(unlocked)
            assert lock is not None, "no other process knows the folder"
            stack.enter_context(lock)
            unlocked.rename(Path(folder, _LOCK))  # which is locked as soon as it has its name
        yield folder


def _remove_left() -> None:
    """Remove temporary folders that killed runs of this user have left, as far as possible."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found, path = os.lstat(folder), folder / _LOCK
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not path.exists():
                continue
            if (lock := try_lock(path)) is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)
