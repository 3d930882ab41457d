"""Reads text files in ranges of bytes, compressed by gzip or not, as UTF-8."""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from plait.errors import DataError
from plait.files import open_file as open_regular_file

PART = 1 << 18
"""Bytes that are read, and characters that are tokenized, at once."""


AHEAD = 1 << 12
"""Characters behind a cut whose tokens must not depend on what stands before it."""


_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")


def read_text(path: str, begin: int, end: int) -> Iterator[str]:
    """Yield a range of a text file in parts of about `PART` bytes; of a compressed file all of it."""
    left = sys.maxsize if is_compressed(path) else end - begin
    at, data, ended = begin, b"", False
    with open_file(path) as file:
        file.seek(begin)
        while not ended:
            read = file.read(min(PART, left))
            left, ended, data = left - len(read), not read, data + read
            whole = len(data) if ended else whole_characters(data)
            if text := decoded(data[:whole], path, at):
                yield text
            at, data = at + whole, data[whole:]


def text_ahead(path: str, begin: int) -> str:
    """Return the `AHEAD` characters of a text file from byte `begin` on."""
    with open_file(path) as file:
        file.seek(begin)
        data = file.read(4 * AHEAD)
    return decoded(data[: whole_characters(data)], path, begin)[:AHEAD]


def is_compressed(path: str) -> bool:
    """Return whether the ending of a path says that the file is compressed by gzip."""
    return path.lower().endswith(".gz")


@contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Context manager that opens a file, compressed or not. Raises DataError where it cannot be read."""
    try:
        with open_regular_file(Path(path)) as file:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed(path) else file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        damaged = " as gzip" if is_compressed(path) else ""
        raise DataError(f"{path} cannot be read{damaged}: {reason}.") from None


def decoded(data: bytes, path: str, at: int) -> str:
    """Return UTF-8 bytes as text. Raises DataError, naming the byte, for invalid UTF-8 and for NUL."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text, at = "\0", at + error.start
    if "\0" in text:
        raise DataError(f"{path} is no UTF-8 text at byte {at}: {not_text_remedy(path)}.")
    return text


def not_text_remedy(path: str) -> str:
    """Return the remedy, as text, for a file that is not UTF-8 text."""
    if path.lower().endswith(_COMPRESSED):
        return "decompress it"
    return "name the text files alone, for instance with a glob such as 'folder/**/*.txt'"


def whole_characters(data: bytes) -> int:
    """Return the number of bytes before a character of which bytes are missing at the end."""
    try:
        return codecs.utf_8_decode(data, "strict", False)[1]
    except UnicodeDecodeError:
        return len(data)
