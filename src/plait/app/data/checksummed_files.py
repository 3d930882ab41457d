"""Files of a corpus, written whole or not at all, with checksums; and JSON files of one object."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from plait.errors import DataError
from plait.files import open_file, read_json, sync_folder

_READ_AT_ONCE = 1 << 22


class ChecksumWriter:
    """A file that is being written, with the CRC-32 of all bytes written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._crc = file, 0

    def write(self, data: Any) -> None:
        """Write an object with a buffer, such as bytes or a contiguous array. Raises OSError."""
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)

    @property
    def checksum(self) -> str:
        """The CRC-32 as eight hexadecimal digits."""
        return f"{self._crc:08x}"


@contextmanager
def whole_file(path: Path) -> Iterator[ChecksumWriter]:
    """Context manager that writes a new file atomically: it is renamed to `path` at the end. Raises OSError.

    Neither a link nor a pipe in the place of the unfinished file is written to.
    """
    partial = partial_path(path)
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            yield ChecksumWriter(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_path(path: Path) -> Path:
    """Return the temporary path at which a file is written before it is renamed."""
    return path.with_name(f"{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises OSError."""
    with whole_file(path) as file:
        file.write(text.encode())


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of a regular file, as eight hexadecimal digits. Raises OSError."""
    crc = 0
    with open_file(path) as file:
        while data := file.read(_READ_AT_ONCE):
            crc = zlib.crc32(data, crc)
    return f"{crc:08x}"


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError, ending with `remedy`, if missing or damaged."""
    try:
        found = read_json(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): {remedy}.") from None
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): {remedy}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object: {remedy}.")
    return found
