"""Paths that a user gave, looked at before anything is opened."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES, _MOST_OF_A_NAME = 4095, 255


def unusable(text: str) -> str | None:
    """Return why no file can have the path `text`, as "which …"; None: nothing is wrong with it."""
    if "\0" in text:
        return "which has a zero byte in it"
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        return "which begins with the home of a user who is not known here"
    if len(os.fsencode(path)) > _MOST_BYTES or any(
        len(os.fsencode(part)) > _MOST_OF_A_NAME for part in path.parts
    ):
        return f"which is longer than file systems take ({_MOST_OF_A_NAME} bytes a name)"
    return None
