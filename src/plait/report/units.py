"""Numbers with their units, as text for people."""

from __future__ import annotations

from datetime import timedelta

from plait.quantities import number_text, seconds_text

__all__ = ["bytes_text", "duration_text", "number_text", "seconds_text"]

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


_MOST_SECONDS = 1e13
"""Of a `timedelta`."""


def bytes_text(value: float) -> str:
    """Return bytes in the largest unit that leaves at least 1 of it; 1 MB is 10⁶ bytes."""
    for size, unit in _BYTES:
        if abs(value) >= size:
            return f"{number_text(value / size, 3)} {unit}"
    return f"{value:,.0f} bytes"


def duration_text(seconds: float) -> str:
    """Return a time of a minute or more as hours, minutes and seconds, a shorter one as `seconds_text`."""
    if not 60 <= seconds < _MOST_SECONDS:
        return seconds_text(seconds)
    return str(timedelta(seconds=round(seconds)))
