"""Reads records in JSON, one per line or in a list, each with its place for error messages."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from plait.app.data.chat_records import holds_chats
from plait.app.data.text_files import is_compressed, open_file
from plait.errors import DataError
from plait.files import json_value

_START = 1 << 20
"""Bytes of a file by which it is judged; its first record ends in them."""
LONGEST_RECORD = 1 << 27
"""Bytes of a line or an element that is read at once; more would be a file without line ends, or a bomb."""
_MAY_BE_NO_NUMBER = re.compile(r"NaN|Infinity|\d[eE]\+?\d\d\d")
_ROWS_IN_A_FIELD = re.compile(r'\{\s*("[^"]*")\s*:\s*\[\s*\{')
_SPACES = re.compile(r"[ \t\r\n]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_AT_ONCE = 1 << 20
"""Bytes that are read at once to count lines."""


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The place of a line in a file, shown as FILE:LINE; the line's number is counted only when shown."""

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
    """The place of a row of a table, or of an element of a list in JSON."""

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
            at -= 1
            file.seek(at)
            while not (before := file.readline(_START)).endswith(b"\n") and before:
                at += len(before)
            at += len(before)
        is_whole = is_compressed(path)
        while is_whole or at < end:
            line = file.readline(LONGEST_RECORD + 1)
            if not line:
                return
            if len(line) > LONGEST_RECORD:
                raise DataError(
                    f"{path} has a line of more than {LONGEST_RECORD >> 20} MiB at byte {at}: divide it into "
                    "documents, each in a line of its own."
                )
            yield at, line
            at += len(line)


def json_kind(path: str) -> Literal["jsonl", "json"] | None:
    """Return how a .json file holds records: "jsonl" (one per line), "json" (a list), None (it is text)."""
    with open_file(path) as file:
        start = file.read(_START).decode(errors="ignore").lstrip("\ufeff \t\r\n")
    if start.startswith("["):
        return "json" if start[1:].lstrip().startswith("{") else None
    if (rows := _ROWS_IN_A_FIELD.match(start)) and holds_chats(_first_value(start, rows.end() - 1) or ()):
        raise DataError(
            f"{path} is an object whose field {rows[1]} lists conversations: give that list by itself, or a "
            "conversation a line as .jsonl."
        )
    found = _first_value(start, 0)
    return "jsonl" if isinstance(found, dict) and (holds_chats(found) or "text" in found) else None


def _first_value(text: str, at: int) -> Any:
    """Return the value that begins at a place of a text in JSON; None where there is no whole one."""
    try:
        return json.JSONDecoder().raw_decode(text, at)[0]
    except (ValueError, RecursionError):
        return None


def read_list(path: str) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the records of a JSON list with their places, a few at a time. DataError if it is no list."""
    number = -1
    with open_file(path) as file:
        try:
            for number, record in enumerate(_elements(_ListText(file))):
                if not isinstance(record, dict):
                    raise DataError(
                        f"{path} has an element {number} that is no JSON object: mend or remove it."
                    )
                yield RowPlace(path, "element", number), record
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            reason = error.msg if isinstance(error, json.JSONDecodeError) else reason
            raise DataError(f"{path} is no JSON behind element {number}: {reason}; mend it.") from None


def _elements(text: _ListText) -> Iterator[Any]:
    """Yield the elements of a list in JSON. Raises ValueError where there is none, RecursionError."""
    if text.next_character() != "[":
        raise ValueError("it is no list")
    after = "]" if text.peek() == "]" else ","
    if after == "]":
        text.next_character()
    while after == ",":
        text.peek()
        yield text.next_value()
        after = text.next_character()
    if after != "]" or text.peek():
        raise ValueError("it goes on behind the list" if after == "]" else "there is no comma")


class _ListText:
    """The text of a file in JSON, of which a few values are held at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8-sig")("surrogatepass")
        self._held, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """Return the next character that is no space, "" at the end of the file."""
        while True:
            place = _SPACES.match(self._held, self._at)
            assert place is not None
            self._at = place.end()
            if self._at < len(self._held) or self._ended:
                return self._held[self._at : self._at + 1]
            self._read(_START)

    def next_character(self) -> str:
        """Return the next character that is no space, and advance past it."""
        found = self.peek()
        self._at += len(found)
        return found

    def next_value(self) -> Any:
        """Return the JSON value that begins at the current place, and advance past it. Raises ValueError."""
        wanted = _START
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(self._held, self._at)
            except ValueError:
                if self._ended:
                    raise
                if wanted > LONGEST_RECORD:
                    raise ValueError(f"it is no value of at most {LONGEST_RECORD >> 20} MiB") from None
                self._read(wanted)
                wanted *= 2
            else:
                value, self._at = self._held[self._at : end], end
                return record_value(value)

    def _read(self, size: int) -> None:
        data = self._file.read(size)
        self._ended = not data
        self._held = self._held[self._at :] + self._decoder.decode(data, self._ended)
        self._at = 0


def read_record(line: bytes, place: LinePlace) -> Mapping[str, Any]:
    """Return the JSON record in a line; invalid characters become `�`. Raises DataError if it is none."""
    reason = ""
    try:
        text = line.decode("utf-8", "surrogatepass")
        found = record_value(text.removeprefix("\ufeff") if place.begin == 0 else text)
    except UnicodeDecodeError as error:
        found, reason = None, f" (it is no UTF-8 at byte {place.begin + error.start})"
    except ValueError as error:
        found, reason = None, f" ({error})"
    if not isinstance(found, dict):
        raise DataError(f"{place} is no JSON object{reason}: mend or remove it.")
    return found


def record_value(text: str) -> Any:
    """Return the value of a JSON text, half surrogate pairs replaced by `�`. Raises ValueError."""
    found = json_value(text, strict=False)
    if "\\u" in text or _HALF_PAIR.search(text):
        found = _characters(found)
    if _MAY_BE_NO_NUMBER.search(text):
        json.dumps(found, allow_nan=False)
    return found


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
