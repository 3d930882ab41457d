"""Exclusive file locks (flock) between processes of a host, released when their process ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import BinaryIO


def try_lock(path: Path) -> BinaryIO | None:
    """Lock the file `path` without waiting, and return it open; None if another process holds the lock.

    The file then contains this process's id and host. Raises OSError where the folder of `path` takes no
    files or locks.
    """
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        except FileNotFoundError:  # its former owner has removed it meanwhile
            pass
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            file.close()
            raise
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file


def unlock(path: Path, file: BinaryIO) -> None:
    """Release the lock that `try_lock` returned, and remove its file."""
    path.unlink(missing_ok=True)
    file.close()


def owner_of(path: Path) -> str:
    """Return the id and host of the process that holds the lock of the file `path`, from its content."""
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
