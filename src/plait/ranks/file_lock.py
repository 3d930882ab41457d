"""Exclusive file locks (flock) between processes of a host, released when their process ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import BinaryIO

from plait.files import open_lock, read_text


def try_lock(path: Path) -> BinaryIO | None:
    """Lock the file `path` without waiting, and return it open; None if another process holds the lock.

    The file then contains this process's id and host, and the time. Raises OSError where the folder of `path`
    takes no files or locks, and where `path` is a link.
    """
    while True:
        file = open_lock(path)
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
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
    file.flush()
    return file


def unlock(path: Path, file: BinaryIO) -> None:
    """Release the lock that `try_lock` returned, and remove its file."""
    path.unlink(missing_ok=True)
    file.close()


def owner_of(path: Path) -> str:
    """Return which process holds the lock of the file `path`, where and since when, from its content."""
    try:
        return read_text(path) or "another process"
    except (OSError, ValueError):
        return "another process"
