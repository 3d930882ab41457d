"""Files of a corpus: written whole or not at all, with checksums; read as JSON objects, and as arrays."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class ArrayFile:
    """A one-dimensional array in a file, with the length, slices and `searchsorted` of NumPy's arrays.

    Not mapped into memory: a process that goes through a corpus keeps neither its files open nor their pages.
    """

    path: Path
    dtype: str
    count: int
    """The number of elements."""
    offset: int = 0
    """The bytes before the first one."""
    ends_of: int | None = None
    """Of ends of documents: the number of tokens. The elements have to ascend up to it."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> NDArray[Any]:
        begin, end, _ = where.indices(self.count)
        with self._opened() as file:
            return self._read(file, begin, max(0, end - begin))

    def searchsorted(self, value: int, side: Literal["left", "right"] = "left") -> int:
        """Return where `value` belongs in the ascending array, before or behind elements that equal it."""
        find = bisect_left if side == "left" else bisect_right
        with self._opened() as file:
            return find(range(self.count), value, key=lambda number: int(self._read(file, number, 1)[0]))

    def is_whole(self) -> bool:
        """Return whether the file is there with the size that its elements take."""
        size = self.offset + self.count * np.dtype(self.dtype).itemsize
        return self.path.is_file() and self.path.stat().st_size == size

    def _read(self, file: int, first: int, count: int) -> NDArray[Any]:
        """Return `count` elements of the opened file. Raises DataError where it ends before."""
        itemsize = np.dtype(self.dtype).itemsize
        data = os.pread(file, count * itemsize, self.offset + first * itemsize)
        if len(data) < count * itemsize:
            raise DataError(f"{self.path} has become shorter since it was opened: write it again.")
        found = np.frombuffer(data, self.dtype)
        if self.ends_of is not None and not _ascends(found, self.ends_of):
            raise DataError(f"{self.path} is damaged (its numbers do not ascend): write it again.")
        return found

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            with open_file(self.path) as file:
                yield file.fileno()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from None


def _ascends(ends: NDArray[Any], most: int) -> bool:
    return not len(ends) or bool(ends[0] >= 0 and ends[-1] <= most and (ends[1:] >= ends[:-1]).all())
