"""Sources of a corpus: the files that they name, and the documents in them, before they are tokenized.

A file is text, JSON lines, a list in JSON, Parquet, or of a data set of Hugging Face. A corpus is divided
into *portions* of some size, which can be read independently, in any order and process: ranges of bytes of
text files, cut where that changes no token, or ranges of rows. The division depends on the files, the size
and the tokenizer alone.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from plait.app.data.chat_records import holds_chats, short_json
from plait.app.data.json_records import (
    LinePlace,
    Place,
    RowPlace,
    json_kind,
    read_lines,
    read_list,
    read_record,
)
from plait.app.data.tables import column_names, dataset_files, is_dataset, read_rows, row_ranges
from plait.app.data.text_files import decoded, is_compressed, not_text_remedy, read_text, text_ahead
from plait.app.data.token_safe_cuts import Encode, text_cuts
from plait.errors import DataError
from plait.files import read_bytes

Kind = Literal["text", "lines", "jsonl", "json", "table"]
"""text: a file is a document. lines: a line is one. jsonl, json, table: a row is one, of JSON lines, a list
in JSON, or Parquet and Arrow."""
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_JSON, _TABLES = (".json", ".json.gz"), (".parquet", ".arrow")
_OF_RECORDS = _JSON_LINES + _JSON + _TABLES
STDLIB_BYTES = 20_000_000  # about the whole library; a bound in case an installation is unusual
_SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests", "idlelib"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus: its path, its kind (text, JSON, table) and its size."""

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
class TextPart:
    """Text of one document, or a part of it."""

    text: str
    begins: bool = True
    """Whether the document begins with it."""
    ends: bool = True
    """Whether the document ends with it."""
    ahead: str = ""
    """Of the last part of a portion: the characters behind it, where the document goes on."""
    unread: tuple[str, ...] = ()
    """The fields beside the text."""


def read_documents(source: str) -> list[bytes]:
    """Return the text of `data.source`: one UTF-8 document per file, ordered by path.

    Raises `DataError` when there is no file, no text, or a binary file.
    """
    if source == "stdlib":
        return list(_standard_library(Path(sysconfig.get_path("stdlib"))))
    documents = [_read_text(path) for path in source_files(source)]
    if not any(documents):
        raise DataError(f"data.source = {source!r} is empty: give a file, folder or glob with text in it.")
    return documents


def _standard_library(root: Path) -> Iterator[bytes]:
    """Yield the standard library's modules ordered by path, without its tests, up to `STDLIB_BYTES`."""
    total = 0
    for path in _walk(root):
        data = path.read_bytes() if path.suffix == ".py" else b""
        if data and _is_text(data):
            total += len(data)
            if total > STDLIB_BYTES:
                return
            yield data
    if not total:
        raise DataError(
            f'data.source = "stdlib" found no Python source in {root}: '
            "this Python comes without it, so give a file or folder of text."
        )


def source_files(source: str) -> list[Path]:
    """Return the files that a path or glob names."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = list(_walk(path))
        if not found:
            raise DataError(f"data.source = {source!r} is a folder without files: give one with text in it.")
        return found
    if path.exists():
        raise DataError(f"data.source = {source!r} is no regular file or folder: give one with text in it.")
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    found = [path for path in found if path.is_file()]
    if not found and source == "random":
        raise DataError(
            "random tokens are data.source of a run only, neither mixed nor given for validation or to "
            "`plait evaluate`: name a file or folder."
        )
    if not found:
        raise DataError(
            f"data.source = {source!r} does not exist: "
            'give "stdlib", "random", or the path of a file, folder, glob or token array; a data set of '
            "Hugging Face is hf://OWNER/NAME."
        )
    return found


def _walk(root: Path) -> Iterator[Path]:
    """Yield every file below `root` in a fixed order, without hidden files and `_SKIPPED` folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _read_text(path: Path) -> bytes:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise DataError(f"data.source: {path} cannot be read: {error.strerror}.") from None
    if not _is_text(data):
        raise DataError(f"data.source: {path} is binary, not UTF-8 text: {not_text_remedy(str(path))}.")
    return data


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def files_of(source: str, *, lines: bool = False) -> list[SourceFile]:
    """Return the files of a path, glob or data set, in the order in which they are read.

    `lines`: whether each line of a text file is a document, instead of the file. Raises DataError where there
    is nothing to read, ConfigError where a package is missing.
    """
    found = []
    paths = dataset_files(source) if is_dataset(source) else source_files(source)
    # Among other files of a folder, such as those of a program, a .json is no data set.
    may_be_records = not lines and (
        not Path(source).expanduser().is_dir()
        or all(path.name.lower().endswith(_OF_RECORDS) for path in paths)
    )
    for path in paths:
        kind: Kind = "lines" if lines else "text"
        name = path.name.lower()
        if name.endswith(_TABLES):
            kind = "table"
        elif name.endswith(_JSON_LINES):
            kind = "jsonl"
        elif name.endswith(_JSON) and may_be_records:
            kind = json_kind(str(path)) or kind
        found.append(SourceFile(str(path), kind, path.stat().st_size))
    if not any(file.size for file in found):
        raise DataError(f"{source!r} is empty: give a file, folder, glob or data set with text in it.")
    return found


def divided(file: SourceFile, size: int, encode: Encode | None = None) -> Iterator[SourceRange]:
    """Yield portions of a file, of about `size` bytes each; `encode` shows where text may be cut."""
    if file.kind == "table":
        for begin, end, held in row_ranges(file.path, size):
            yield SourceRange(file.path, file.kind, begin, end, held)
        return
    if is_compressed(file.path) or file.kind == "json":  # cannot be entered in the middle
        ends: list[int] = [file.size]
    elif file.kind == "text":
        ends = list(text_cuts(file.path, size, file.size, encode))
    else:
        ends = [*range(size, file.size, size), file.size]
    for begin, end in pairwise([0, *ends]):
        yield SourceRange(file.path, file.kind, begin, end, end - begin)


def read_texts(portion: SourceRange, column: str) -> Iterator[TextPart]:
    """Yield the texts in a portion of a file; `column`: a table's column of text. DataError for no text."""
    if portion.kind == "text":
        yield from _parts_of_text(portion)
    elif portion.kind == "lines":
        for at, line in read_lines(portion.path, portion.begin, portion.end):
            if text := decoded(line, portion.path, at).rstrip("\r\n"):
                yield TextPart(text)
    else:
        yield from _texts_of_records(portion, column)


def read_records(
    portion: SourceRange, columns: Collection[str] | None
) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the records in JSON, or `columns` (None: all) of the rows of a table, each with its place."""
    if portion.kind == "table":
        for number, row in read_rows(portion.path, portion.begin, portion.end, columns):
            yield RowPlace(portion.path, "row", number), row
        return
    if portion.kind == "json":
        yield from read_list(portion.path)
        return
    if portion.kind != "jsonl":
        raise DataError(f"{portion.path} holds no records: give JSON lines or tables.")
    for at, line in read_lines(portion.path, portion.begin, portion.end):
        if line.strip():
            place = LinePlace(portion.path, at)
            yield place, read_record(line, place)


def field_names(file: SourceFile) -> list[str]:
    """Return the columns of a table, or the fields of the first record in JSON; empty for text files."""
    if file.kind == "table":
        return column_names(file.path)
    if file.kind not in ("jsonl", "json"):
        return []
    records = read_records(SourceRange(file.path, file.kind, 0, file.size, file.size), None)
    return next((list(record) for _, record in records), [])


def _parts_of_text(portion: SourceRange) -> Iterator[TextPart]:
    """Yield a range of a text file in parts; the whole file is one document."""
    begins, held = portion.begin == 0, ""
    for text in read_text(portion.path, portion.begin, portion.end):
        if held:
            yield TextPart(held, begins, ends=False)
            begins = False
        held = text
    is_whole = is_compressed(portion.path)
    size = portion.end if is_whole else Path(portion.path).stat().st_size
    if held and portion.end < size:
        yield TextPart(held, begins, ends=False, ahead=text_ahead(portion.path, portion.end))
    elif held:
        yield TextPart(held, begins)


def _texts_of_records(portion: SourceRange, column: str) -> Iterator[TextPart]:
    """Yield the text of each record, but for empty ones."""
    columns = column_names(portion.path) if portion.kind == "table" else None
    if columns is not None and column not in columns:
        raise DataError(
            f"{portion.path} has no column {column!r} (it has: {', '.join(columns)}): give --column."
        )
    for place, record in read_records(portion, (column,)):
        text = record.get(column)
        if not isinstance(text, str) and column == "text" and holds_chats(record.keys()):
            raise DataError(
                f"{place} is a conversation, and the column {column!r} is to be read: leave --column out, or "
                "write texts and conversations to two files."
            )
        if column in record and not isinstance(text, str):
            raise DataError(
                f"{place} has a {column!r} that is {short_json(text)}, and no text: mend or remove it."
            )
        if not isinstance(text, str):
            raise DataError(
                f"{place} has no text {column!r} (it has: {', '.join(sorted(record))}): give --column."
            )
        if text:
            yield TextPart(text, unread=tuple(name for name in columns or record if name != column))
