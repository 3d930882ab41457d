"""A disk that is full after some writes."""

from __future__ import annotations

import errno
from typing import BinaryIO

from plait.checkpoint.file_system_calls import Disk


class Full(Disk):
    """Has room for so many writes, and then for none."""

    def __init__(self, room: int) -> None:
        self._room = room

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self._room -= 1
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)
