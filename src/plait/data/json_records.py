"""Records in JSON: one a line, or a list of them; the place of each, for errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plait.data.chat_records import holds_chats
from plait.data.text_files import open_file
from plait.errors import DataError

_START = 1 << 20
"""Bytes of a file by which it is judged; its first record ends in them."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_AT_ONCE = 1 << 20
"""Bytes that are read at once to count lines."""


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line of a file; as text FILE:LINE, for which the lines before it are counted."""

    path: str
    begin: int
    """The byte at which the line begins."""

    def __str__(self) -> str:
        left, number = self.begin, 1
        with open_file(self.path) as file:
            while left and (data := file.read(min(left, _AT_ONCE))):
                left, number = left - len(data), number + data.count(b"\n")
        return f"{self.path}:{number}"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row of a table, or an element of a list in JSON."""

    path: str
    kind: Literal["row", "element"]
    number: int

    def __str__(self) -> str:
        return f"{self.path}, {self.kind} {self.number},"


Place = LinePlace | RowPlace


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


def json_kind(path: str) -> Literal["jsonl", "json"] | None:
    """Return how a .json file holds records: a list of them, or one a line, of texts or conversations.

    None of a file that holds another value, and is read as text.
    """
    with open_file(path) as file:
        start = file.read(_START).decode(errors="ignore").lstrip("\ufeff \t\r\n")
    is_list = start.startswith("[")
    try:
        found, _ = json.JSONDecoder().raw_decode(start.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not (is_list or holds_chats(found) or "text" in found):
        return None
    return "json" if is_list else "jsonl"


def read_list(path: str) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the records of a list in JSON, each with its place. Raises DataError where it is none."""
    with open_file(path) as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is no JSON: {error}; mend it.") from None
    for number, record in enumerate(found):
        if not isinstance(record, dict):
            raise DataError(f"{path} has an element {number} that is no JSON object: mend or remove it.")
        yield RowPlace(path, "element", number), _characters(record)


def read_record(line: bytes, place: LinePlace) -> Mapping[str, Any]:
    """Return a line as a record, with `�` for what is no character. Raises DataError where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{place} is no JSON object: mend or remove it.")
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
