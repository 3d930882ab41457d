"""Quantities with units that fit their size, as text: numbers, seconds, memory, counts."""

from __future__ import annotations

import math

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MEMORY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def number_text(value: float, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, and commas between thousands."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals > digits + 2:
        return f"{value:.{digits - 1}e}"
    text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds_text(value: float, digits: int = 3) -> str:
    """Return a short time in s, ms or µs."""
    size, unit = next(((size, unit) for size, unit in _SECONDS if abs(value) >= size), _SECONDS[-1])
    return f"{number_text(value / size, digits)} {unit}"


def memory_text(value: float) -> str:
    """Return the bytes of a memory in the largest binary unit that leaves at least 1 of it; 1 GiB is 2³⁰."""
    for size, unit in _MEMORY:
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} bytes"


def count_text(value: float) -> str:
    """Return a number of things, from a million on with three digits and a word."""
    for size, word in _COUNTS:
        if value >= size:
            return f"{number_text(value / size, 3)} {word}"
    return f"{value:,.0f}"


def signed(text: str) -> str:
    """Return the text of a quantity with its sign, also where it is positive; 0 has none."""
    return text if text.startswith(("-", "0 ")) else f"+{text}"
