"""Records in JSON lines, one a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from plait.data.text_files import open_file
from plait.errors import DataError

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def read_lines(path: str, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a range of a file, with the byte at which each begins."""
    with open_file(path) as file:
        at = begin
        if at:  # the line that began before belongs to the range before
            file.seek(at - 1)
            at += len(file.readline()) - 1
        is_whole = path.endswith(".gz")
        while is_whole or at < end:
            line = file.readline()
            if not line:
                return
            yield at, line
            at += len(line)


def read_record(line: bytes, path: str, at: int) -> Mapping[str, Any]:
    """Return a line as a record, with `�` for what is no character. Raises DataError where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} has a line at byte {at} that is no JSON object: mend or remove it.")
    may_have_halves = b"\\u" in line or b"\xed" in line
    return found if not may_have_halves else _characters(found)


def whole_characters(text: str) -> str:
    """Return a text with `�` for halves of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return _HALF_PAIR.sub("�", text)


def _characters(value: Any) -> Any:
    """Return a value of JSON whose texts have whole characters only."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_characters(one) for one in value]
    if isinstance(value, dict):
        return {whole_characters(name): _characters(one) for name, one in value.items()}
    return value
