"""A lock of a folder, so that one process at a time prepares a corpus there."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from plait.errors import DataError

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
                f"{folder} is being prepared by {_owner(path)}{waited}: wait until it has finished, or end "
                "it and repeat the command, which goes on from there."
            )
        time.sleep(min(_SECONDS_BETWEEN_TRIES, patience))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _acquired(path: Path) -> BinaryIO | None:
    """Return the locked file, with this process's name in it; None where another process holds it."""
    while True:
        try:
            file = path.open("a+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:  # its former owner has removed it meanwhile
            pass
        except OSError as error:
            raise DataError(
                f"{path.parent} cannot be locked ({error.strerror}): choose another folder."
            ) from None
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file


def _owner(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"


def _state(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files in a folder."""
    found = []
    for one in os.scandir(folder):
        try:
            found.append((one.name, one.stat().st_size))
        except FileNotFoundError:  # it was renamed meanwhile
            continue
    return found
