"""Documents of a corpus before it is tokenized: text, JSON lines, Parquet, data sets of Hugging Face.

A corpus is divided into *portions* of some size, which can be read independently, in any order and process:
ranges of bytes of text files, cut at line ends, or ranges of rows. The division depends on the files and the
size alone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from plait.data.corpus import source_files
from plait.errors import ConfigError, DataError

Kind = Literal["text", "lines", "jsonl", "parquet", "dataset"]
"""text: a file is a document. lines: a line is one."""
PIECE = 1 << 18
"""Bytes of text that are tokenized at once; long documents are cut there, at a line end where possible."""
_LONGEST_LINE = 1 << 20
"""Bytes in which a line end is looked for, to cut a text."""
_TEXT_IN_JSON = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@dataclass(frozen=True)
class SourceRange:
    """A range of one file: of bytes, of row groups (Parquet), or of rows."""

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


def portions_of(source: str, size: int, *, lines: bool = False) -> list[SourceRange]:
    """Return the portions of a file, folder, glob or data set, each of about `size` bytes.

    `lines`: whether each line of a text file is a document, instead of the file. Raises DataError where there
    is nothing to read, ConfigError where a package is missing.
    """
    folder = Path(source).expanduser()
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return list(_portions_of_dataset(str(folder), size))
    found: list[SourceRange] = []
    for path in source_files(source):
        if path.name.endswith(".parquet"):
            found += _portions_of_parquet(str(path), size)
            continue
        kind: Kind = "jsonl" if path.name.endswith(_TEXT_IN_JSON) else "lines" if lines else "text"
        total = path.stat().st_size
        if path.suffix == ".gz":  # cannot be entered in the middle
            found.append(SourceRange(str(path), kind, 0, total, total))
            continue
        for begin in range(0, max(1, total), size):
            end = min(begin + size, total)
            found.append(SourceRange(str(path), kind, begin, end, end - begin))
    if not any(portion.size for portion in found):
        raise DataError(f"{source!r} is empty: give a file, folder, glob or data set with text in it.")
    return found


def read_pieces(portion: SourceRange, column: str) -> Iterator[TextPiece]:
    """Yield the documents of a portion; `column` is the field of JSON or the column that holds the text.

    Raises DataError for what is no UTF-8 text, no JSON, or has no such field.
    """
    if portion.kind in ("parquet", "dataset"):
        for text in _rows(portion, column):
            yield from _pieces_of_text(text)
    elif portion.kind == "jsonl":
        for at, line in _lines(portion):
            if line.strip():
                yield from _pieces_of_text(_field(line, column, portion.path, at))
    elif portion.kind == "lines":
        for at, line in _lines(portion):
            if text := _decoded(line, portion.path, at).rstrip("\r\n"):
                yield from _pieces_of_text(text)
    else:
        yield from _text(portion)


def read_records(one: SourceRange) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the records of a range of JSON lines, with the byte at which each begins."""
    if one.kind != "jsonl":
        raise DataError(f"{one.path} holds no JSON lines: give conversations as .jsonl files.")
    for at, line in _lines(one):
        if line.strip():
            yield at, _record(line, one.path, at)


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
    with _open(portion.path) as file:
        if portion.path.endswith(".gz"):
            yield from _pieces_of_text(_decoded(file.read(), portion.path, 0))
            return
        total = Path(portion.path).stat().st_size
        begin, end = (_cut(file, one, total) for one in (portion.begin, portion.end))
        while begin < end:
            after = min(end, _cut(file, min(begin + PIECE, end), total))
            file.seek(begin)
            text = _decoded(file.read(after - begin), portion.path, begin)
            yield TextPiece(text, after == total)
            begin = after


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


def _field(line: bytes, column: str, path: str, at: int) -> str:
    found = _record(line, path, at)
    text = found.get(column)
    if not isinstance(text, str):
        known = ", ".join(sorted(found))
        raise DataError(
            f"{path} has a line at byte {at} without a text {column!r} (it has: {known}): give --column."
        )
    return text


def _portions_of_parquet(path: str, size: int) -> Iterator[SourceRange]:
    """Yield ranges of row groups of a Parquet file."""
    metadata = _parquet(path).metadata
    begin, held = 0, 0
    for number in range(metadata.num_row_groups):
        held += metadata.row_group(number).total_byte_size
        if held >= size or number == metadata.num_row_groups - 1:
            yield SourceRange(path, "parquet", begin, number + 1, held)
            begin, held = number + 1, 0


def _portions_of_dataset(path: str, size: int) -> Iterator[SourceRange]:
    """Yield ranges of rows of a data set on the disk."""
    rows = len(_dataset(path))
    each = max(1, sum(one.stat().st_size for one in Path(path).glob("*.arrow")) // max(1, rows))
    step = max(1, size // each)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield SourceRange(path, "dataset", begin, end, (end - begin) * each)


def _rows(portion: SourceRange, column: str) -> Iterator[str]:
    """Yield the texts of a range of rows, or of row groups."""
    if portion.kind == "parquet":
        file = _parquet(portion.path)
        _require_column(column, file.schema_arrow.names, portion.path)
        groups = range(portion.begin, portion.end)
        batches = file.iter_batches(1024, row_groups=list(groups), columns=[column])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
    else:
        table = _dataset(portion.path)
        _require_column(column, table.column_names, portion.path)
        rows = table.select_columns([column]).select(range(portion.begin, portion.end))
        texts = (row[column] for row in rows)
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{portion.path} has a {column!r} that is no text: give another --column.")
        yield text


def _require_column(column: str, known: Sequence[str], path: str) -> None:
    if column not in known:
        raise DataError(f"{path} has no column {column!r} (it has: {', '.join(known)}): give --column.")


def _parquet(path: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile`."""
    parquet = _imported("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # the library raises many types
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}.") from None


def _dataset(path: str) -> Any:
    """Return a data set on the disk as a `datasets.Dataset`, memory-mapped."""
    datasets = _imported("datasets", path)
    try:
        found = datasets.load_from_disk(path)
    except Exception as error:  # the library raises many types
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}.") from None
    if not isinstance(found, datasets.Dataset):
        raise DataError(f"{path} has several splits: give the folder of one of them.")
    return found


def _imported(module: str, path: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{path} needs the package datasets: pip install 'plait[data]'.") from None
