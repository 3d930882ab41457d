"""Locks between processes of a host, each a file: a process that ends, or is killed, releases its locks."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import BinaryIO


def try_lock(path: Path) -> BinaryIO | None:
    """Return the file `path`, locked, with this process's name in it; None where another process holds it.

    Raises OSError where the folder of `path` takes no files or locks.
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
    """Return the name of the process that holds a lock."""
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
