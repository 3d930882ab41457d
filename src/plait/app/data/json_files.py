"""Files that hold one object in JSON, such as those of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.errors import DataError
from plait.files import read_json


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises DataError, which ends with `remedy`, where there is none."""
    try:
        found = read_json(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): {remedy}.") from None
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): {remedy}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object: {remedy}.")
    return found
