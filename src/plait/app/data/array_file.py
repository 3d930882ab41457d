"""`ArrayFile`: an array in a file, of which only the parts that are asked for are read."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError
from plait.files import open_file


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
