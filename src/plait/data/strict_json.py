"""JSON as its standard has it: Python's parser also takes values that others read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import DataError
from plait.regular_files import read_regular_file

LARGEST_FILE = 1 << 28
"""Bytes of a file that is read at once, such as a tokenizer.json."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a text in JSON. Raises ValueError, with the reason, for a text that is none.

    Refused are names that occur twice in an object, NaN and Infinity, and values that are nested deeper than
    Python's stack. Bytes are UTF-8, and may begin with a byte order mark.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 at byte {error.start}") from None


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a file in JSON. Raises DataError, which ends with `remedy`, where it has none."""
    try:
        found = parse_json(read_regular_file(path, LARGEST_FILE))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): {remedy}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object: {remedy}.")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it has {twice[:50]!r} twice in one object")
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no number of JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refused)
"""Raises ValueError as `parse_json` does, and RecursionError."""
