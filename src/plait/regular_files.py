"""Regular files, opened and read without waiting: no pipe, socket, device or folder in their place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, or a link to one. Raises OSError for anything else, by what it is.

    A pipe that nobody writes to would be waited for without end, a device read without end.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte in its name
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, and no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular_file(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file. Raises OSError, also where it has more than `most` bytes."""
    with open_regular_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return data
