"""Quantities as text: numbers, seconds, memory and counts, with units that fit their size; round numbers."""

from __future__ import annotations

import math
from datetime import timedelta

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MEMORY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_MOST_SECONDS = 1e13
"""Of a `timedelta`."""


def number_text(value: float, digits: int = 4) -> str:
    """Return a number as text with `digits` significant digits, and commas between thousands."""
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
    """Return a time, given in seconds, as text in s, ms or µs, with `digits` significant digits."""
    size, unit = next(((size, unit) for size, unit in _SECONDS if abs(value) >= size), _SECONDS[-1])
    return f"{number_text(value / size, digits)} {unit}"


def duration_text(seconds: float) -> str:
    """Return a time as `h:mm:ss` text from a minute on, a shorter one in s, ms or µs."""
    if not 60 <= seconds < _MOST_SECONDS:
        return seconds_text(seconds)
    return str(timedelta(seconds=round(seconds)))


def bytes_text(value: float) -> str:
    """Return a number of bytes as text in decimal units, such as "1.5 MB": 1 MB is 10⁶ bytes."""
    for size, unit in _BYTES:
        if abs(value) >= size:
            return f"{number_text(value / size, 3)} {unit}"
    return f"{value:,.0f} bytes"


def memory_text(value: float) -> str:
    """Return a number of bytes as text in binary units, such as "1.5 GiB": 1 GiB is 2³⁰ bytes."""
    for size, unit in _MEMORY:
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} bytes"


def count_text(value: float) -> str:
    """Return a count as text, such as '1.23 million'."""
    for size, word in _COUNTS:
        if value >= size:
            return f"{number_text(value / size, 3)} {word}"
    return f"{value:,.0f}"


def microbatches_text(count: int) -> str:
    """Return a number of micro-batches, such as "1 micro-batch"."""
    return f"{count} micro-batch{'es' * (count > 1)}"


def with_unit(value: float, unit: str) -> str:
    """Return a number as text with six significant digits, and `unit` behind it unless that is ""."""
    return f"{value:g} {unit}" if unit else f"{value:g}"


def round_numbers(low: float, high: float, at_most: int) -> list[float]:
    """Return at most `at_most` (2 or more) round, evenly spaced numbers from `low` to `high`, for an axis."""
    length = high - low
    if length <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(length / (at_most - 1)))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if length < power * factor * at_most)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def signed(text: str) -> str:
    """Return the text of a quantity with its sign, also where it is positive; 0 has none."""
    return text if text.startswith(("-", "0 ")) else f"+{text}"
