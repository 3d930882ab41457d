"""`ArrayFile`: an array on the disk, of which each access reads only what it asks for."""

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

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> NDArray[Any]:
        begin, end, _ = where.indices(self.count)
        itemsize = np.dtype(self.dtype).itemsize
        size = max(0, end - begin) * itemsize
        with self._opened() as file:
            data = os.pread(file, size, self.offset + begin * itemsize)
        if len(data) < size:
            raise DataError(f"{self.path} has become shorter since it was opened: write it again.")
        return np.frombuffer(data, self.dtype)

    def searchsorted(self, value: int, side: Literal["left", "right"] = "left") -> int:
        """Return where `value` belongs in the ascending array, before or behind elements that equal it."""
        itemsize = np.dtype(self.dtype).itemsize
        with self._opened() as file:

            def element(number: int) -> int:
                data = os.pread(file, itemsize, self.offset + number * itemsize)
                return int(np.frombuffer(data, self.dtype)[0])

            find = bisect_left if side == "left" else bisect_right
            return find(range(self.count), value, key=element)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            yield file
        finally:
            os.close(file)
