"""`ProcessorUse`: the share of the time in which the processors of a host are busy, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_COUNTS = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of the first line: time that is idle, and that waits for a disk."""
_COUNTED = 8
"""Columns; the two after them, of guests, are in the first ones."""


class ProcessorUse:
    """Measures how busy the processors of this host are, with all processes, between two readings."""

    def __init__(self, path: Path = _COUNTS) -> None:
        self._path = path
        self._before = self._times()

    def share(self) -> float | None:
        """Return the busy share of the processors since the last call, 0 to 1; None if unknown."""
        before, self._before = self._before, self._times()
        if before is None or self._before is None:
            return None
        busy, whole = self._before[0] - before[0], self._before[1] - before[1]
        return min(1.0, max(0.0, busy / whole)) if whole > 0 else None

    def _times(self) -> tuple[int, int] | None:
        """Return busy and whole time since the host started, of all processors; None if unknown."""
        with suppress(OSError, ValueError, IndexError):
            with self._path.open(encoding="ascii") as file:
                name, *columns = file.readline().split()
            times = [int(one) for one in columns[:_COUNTED]]
            idle = sum(times[column] for column in _IDLE)
            return (sum(times) - idle, sum(times)) if name == "cpu" else None
        return None
