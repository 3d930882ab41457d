"""Documents of a corpus before it is tokenized: text, JSON lines, Parquet, data sets of Hugging Face.

A corpus is divided into *portions* of some size, which can be read independently, in any order and process:
ranges of bytes of text files, cut at line ends, or ranges of rows. The division depends on the files and the
size alone.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from plait.data.corpus import source_files
from plait.data.tables import column_names, dataset_files, is_dataset, read_rows, row_ranges
from plait.errors import DataError

Kind = Literal["text", "lines", "jsonl", "table"]
"""text: a file is a document. lines: a line is one. table: a row is one, of Parquet or Arrow."""
PIECE = 1 << 18
"""Bytes of text that are tokenized at once; long documents are cut there, at a line end where possible."""
_LONGEST_LINE = 1 << 20
"""Bytes in which a line end is looked for, to cut a text."""
_TEXT_IN_JSON = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus."""

    path: str
    kind: Kind
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A range of one file: of bytes, of row groups (Parquet), or of rows (Arrow)."""

    path: str
    kind: Kind
    begin: int
    end: int
    size: int
    """In bytes, for the progress."""


@dataclass(frozen=True)
class TextPiece:
    """Text of one document, or a part of it."""

    text: str
    ends: bool
    """Whether the document ends with it."""


def files_of(source: str, *, lines: bool = False) -> list[SourceFile]:
    """Return the files of a path, glob or data set, in the order in which they are read.

    `lines`: whether each line of a text file is a document, instead of the file. Raises DataError where there
    is nothing to read, ConfigError where a package is missing.
    """
    found = []
    for path in dataset_files(source) if is_dataset(source) else source_files(source):
        kind: Kind = "lines" if lines else "text"
        if path.suffix in (".parquet", ".arrow"):
            kind = "table"
        elif path.name.endswith(_TEXT_IN_JSON):
            kind = "jsonl"
        found.append(SourceFile(str(path), kind, path.stat().st_size))
    if not any(file.size for file in found):
        raise DataError(f"{source!r} is empty: give a file, folder, glob or data set with text in it.")
    return found


def divided(file: SourceFile, size: int) -> Iterator[SourceRange]:
    """Yield the portions of a file, each of about `size` bytes."""
    if file.kind == "table":
        for begin, end, held in row_ranges(file.path, size):
            yield SourceRange(file.path, file.kind, begin, end, held)
    elif file.path.endswith(".gz"):  # cannot be entered in the middle
        yield SourceRange(file.path, file.kind, 0, file.size, file.size)
    else:
        for begin in range(0, max(1, file.size), size):
            end = min(begin + size, file.size)
            yield SourceRange(file.path, file.kind, begin, end, end - begin)


def read_pieces(portion: SourceRange, column: str) -> Iterator[TextPiece]:
    """Yield the documents of a portion; `column` is the field of JSON or the column that holds the text.

    Raises DataError for what is no UTF-8 text, no JSON, or has no such field.
    """
    if portion.kind == "text":
        yield from _text(portion)
    elif portion.kind == "lines":
        for at, line in _lines(portion):
            yield from _pieces_of_text(_decoded(line, portion.path, at).rstrip("\r\n"))
    else:
        if portion.kind == "table":
            _require_column(column, portion.path)
        for place, record in read_records(portion, (column,)):
            text = record.get(column)
            if not isinstance(text, str) and column == "text" and {"messages", "prompt"} & record.keys():
                raise DataError(
                    f"{portion.path} has a conversation {place} among texts: write them to two files, and "
                    "give both as sources (data.mixture)."
                )
            if not isinstance(text, str):
                raise DataError(
                    f"{portion.path} has a record {place} without a text {column!r} (it has: "
                    f"{', '.join(sorted(record))}): give --column."
                )
            yield from _pieces_of_text(text)


def read_records(portion: SourceRange, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of JSON lines, or those `columns` of the rows of a table, each with its place."""
    if portion.kind == "table":
        for number, row in read_rows(portion.path, portion.begin, portion.end, columns):
            yield f"in row {number}", row
        return
    if portion.kind != "jsonl":
        raise DataError(f"{portion.path} holds no records: give JSON lines or tables.")
    for at, line in _lines(portion):
        if line.strip():
            yield f"at byte {at}", _record(line, portion.path, at)


def field_names(file: SourceFile) -> list[str]:
    """Return the columns of a table, or the fields of the first record of JSON lines; none of other files."""
    if file.kind == "table":
        return column_names(file.path)
    if file.kind != "jsonl":
        return []
    records = read_records(SourceRange(file.path, file.kind, 0, file.size, file.size), ())
    return list(next(records, ("", {}))[1])


def _pieces_of_text(text: str) -> Iterator[TextPiece]:
    """Cut a document into pieces, after a line end where there is one in the second half of a piece.

    None of an empty document.
    """
    begin = 0
    while len(text) - begin > PIECE:
        line_end = text.rfind("\n", begin + PIECE // 2, begin + PIECE)
        cut = line_end + 1 if line_end >= 0 else begin + PIECE
        yield TextPiece(text[begin:cut], False)
        begin = cut
    if text:
        yield TextPiece(text[begin:], True)


def _text(portion: SourceRange) -> Iterator[TextPiece]:
    """Yield a range of a text file in pieces; the whole file is one document."""
    if portion.path.endswith(".gz"):
        yield from _compressed_text(portion.path)
        return
    with _open(portion.path) as file:
        total = Path(portion.path).stat().st_size
        begin, end = (_cut(file, one, total) for one in (portion.begin, portion.end))
        while begin < end:
            after = min(end, _cut(file, min(begin + PIECE, end), total))
            file.seek(begin)
            text = _decoded(file.read(after - begin), portion.path, begin)
            yield TextPiece(text, after == total)
            begin = after


def _compressed_text(path: str) -> Iterator[TextPiece]:
    """Yield a compressed text file in pieces."""
    at, data, text, ended = 0, b"", "", False
    with _open(path) as file:
        while not ended:
            read = file.read(PIECE) + file.readline(_LONGEST_LINE)
            ended, data = not read, data + read
            whole = len(data) if ended else _whole_characters(data)
            if whole and text:
                yield TextPiece(text, False)
            text, at, data = _decoded(data[:whole], path, at) or text, at + whole, data[whole:]
    if text:
        yield TextPiece(text, True)


def _whole_characters(data: bytes) -> int:
    """Return the number of bytes before a character of which bytes are missing at the end."""
    try:
        return codecs.utf_8_decode(data, "strict", False)[1]
    except UnicodeDecodeError:
        return len(data)


def _cut(file: BinaryIO, at: int, total: int) -> int:
    """Return where to cut a text near byte `at`: after the next line end, else between two characters."""
    if at in (0, total):
        return at
    file.seek(at - 1)
    line = file.readline(_LONGEST_LINE)
    if line.endswith(b"\n") or at - 1 + len(line) == total:
        return at - 1 + len(line)
    while at < total and (line[1] & 0xC0) == 0x80:  # within a character of several bytes
        at, line = at + 1, line[1:]
    return at


def _lines(portion: SourceRange) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a range of a file, with the byte at which each begins."""
    with _open(portion.path) as file:
        at = portion.begin
        if at:  # the line that began before belongs to the portion before
            file.seek(at - 1)
            at += len(file.readline()) - 1
        is_whole = portion.path.endswith(".gz")
        while is_whole or at < portion.end:
            line = file.readline()
            if not line:
                return
            yield at, line
            at += len(line)


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path) if path.endswith(".gz") else Path(path).open("rb") as file:
            yield cast(BinaryIO, file)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def _decoded(data: bytes, path: str, at: int) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text, at = "\0", at + error.start
    if "\0" in text:
        raise DataError(
            f"{path} is no UTF-8 text at byte {at}: name the text files alone, for instance with a glob such "
            "as 'folder/**/*.txt'."
        )
    return text


def _record(line: bytes, path: str, at: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} has a line at byte {at} that is no JSON object: mend or remove it.")
    return found


def _require_column(column: str, path: str) -> None:
    if column not in (known := column_names(path)):
        raise DataError(f"{path} has no column {column!r} (it has: {', '.join(known)}): give --column.")
