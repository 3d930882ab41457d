"""Reads TOML files: regular files in UTF-8, with the integers that TOML has, and not nested without end."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait.files import read_text, require_levels


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError, and ValueError as `toml_value`."""
    return toml_value(read_text(path))


def toml_value(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises ValueError, also for integers that take more than 64 bits."""
    try:
        found = tomllib.loads(text)
        require_levels(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for name, one in _values(found):
        if isinstance(one, int) and one.bit_length() > 63:
            raise ValueError(f"{name} is a whole number that takes more than 64 bits")
    return found


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in tables and lists, with their names."""
    if isinstance(content, dict):
        for key, one in content.items():
            yield from _values(one, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for one in content:
            yield from _values(one, name)
    else:
        yield name, content
