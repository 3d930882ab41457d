"""How much memory this process takes while it writes, files that are mapped into it aside."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from plait.checkpoint.file_system_calls import Disk

_STATUS = Path("/proc/self/status")
MEASURED = _STATUS.exists()


def anonymous() -> int:
    """Bytes that are no files."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


class Watching(Disk):
    """Looks at the memory whenever something is written."""

    def __init__(self) -> None:
        self.peak = 0

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.peak = max(self.peak, anonymous())
        super().write(file, data)
