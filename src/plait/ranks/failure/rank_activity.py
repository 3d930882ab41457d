"""`ActivityFile`: a file in memory in which a rank writes what it waits for; its supervisor reads it.

The rank writes a time whenever it begins or ends a wait for other ranks: so a rank that is stopped, or loops
for ever, does not look alive as it would by messages of a thread.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

_VARIABLE = "PLAIT_ACTIVITY"
_HEAD = struct.Struct("=d?H")  # monotonic time, whether it waits, bytes of the text
_MOST_TEXT = 240
_BYTES = _HEAD.size + _MOST_TEXT


class Activity(NamedTuple):
    """Whether a rank waits for others or computes, since when, and what it waits for."""

    since: float
    """The host's monotonic time, in seconds; infinite before the rank has waited for the first time."""
    waits: bool
    """Whether it waits for other ranks; else it computes."""
    awaited: str
    """What it waits for, or has waited for last; completes "it waits for ..."."""


class ActivityFile:
    """A memory-mapped file in which a rank writes what it waits for, for its supervisor to read."""

    def __init__(self, path: Path) -> None:
        """Map the activity file at `path` into memory; `begin` creates such files."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._text = b""

    @staticmethod
    def begin(path: Path) -> ActivityFile:
        """Create and open the activity file of a rank before it starts, with no wait in it.

        Until its first wait the rank cannot be found to hang.
        """
        path.write_bytes(_HEAD.pack(math.inf, False, 0).ljust(_BYTES, b"\0"))
        return ActivityFile(path)

    def begin_wait(self, awaited: str) -> None:
        """Write to the file that the rank starts to wait, and for what."""
        self._text = awaited.encode()[:_MOST_TEXT]
        self._write(waits=True)

    def end_wait(self) -> None:
        """Write to the file that the rank's wait has ended."""
        self._write(waits=False)

    def read(self) -> Activity:
        """Return what the rank wrote last: whether it waits, since when, and for what."""
        since, waits, size = _HEAD.unpack_from(self._memory)
        return Activity(since, waits, self._memory[_HEAD.size : _HEAD.size + size].decode(errors="replace"))

    def _write(self, *, waits: bool) -> None:
        data = _HEAD.pack(time.monotonic(), waits, len(self._text)) + self._text
        self._memory[: len(data)] = data


def activity_file_of_rank() -> ActivityFile | None:
    """Return the file to which this rank writes its activity; None without a supervisor."""
    path = os.environ.get(_VARIABLE)
    return ActivityFile(Path(path)) if path else None


def variables_of_activity(path: Path) -> dict[str, str]:
    """Return the environment variables that make a rank write its activity to the file at `path`."""
    return {_VARIABLE: str(path)}
