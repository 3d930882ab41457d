"""A lock of a folder, so that one process at a time prepares a corpus there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from plait.errors import DataError
from plait.ranks.file_lock import owner_of, try_lock, unlock

LOCK = "preparation.lock"
"""Names the process that prepares a corpus in the folder."""
_SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def locked_folder(folder: Path, patience: float) -> Iterator[None]:
    """Context manager that holds the lock of a folder, which is made where it is missing.

    Another process that holds it is waited for as long as the files in the folder change at least every
    `patience` seconds; then DataError names that process. A process that ends, or is killed, releases its
    locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}): choose another folder.") from None
    path, seen, since = folder / LOCK, _state(folder), time.monotonic()
    while (file := _acquired(path)) is None:
        if (state := _state(folder)) != seen:
            seen, since = state, time.monotonic()
        if time.monotonic() - since >= patience:
            waited = f", and has written nothing for {patience:g} seconds" if patience else ""
            raise DataError(
                f"{folder} is being prepared by {owner_of(path)}{waited}: wait until it has finished, or end "
                "it and repeat the command, which goes on from there."
            )
        time.sleep(min(_SECONDS_BETWEEN_TRIES, patience))
    try:
        yield
    finally:
        unlock(path, file)


def _acquired(path: Path) -> BinaryIO | None:
    try:
        return try_lock(path)
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be locked ({error.strerror}): choose another folder."
        ) from None


def _state(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files in a folder."""
    found = []
    with os.scandir(folder) as entries:
        for one in entries:
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                found.append((one.name, one.stat(follow_symlinks=False).st_size))
    return found
