"""Arrays on the disk: the same values as in memory, and no byte more is read than is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.app.data.array_file import ArrayFile
from plait.errors import DataError


@given(
    values=st.lists(st.integers(0, 50), max_size=30).map(sorted),
    where=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    value=st.integers(-1, 60),
    offset=st.integers(0, 9),
)
def test_an_array_file_slices_and_searches_as_its_numpy_array(
    tmp_path_factory: Any, values: list[int], where: tuple[int, int], value: int, offset: int
) -> None:
    array = np.array(values, dtype=np.int64)
    path: Path = tmp_path_factory.getbasetemp() / "array.bin"
    path.write_bytes(b"x" * offset + array.tobytes() + b"rest")
    found = ArrayFile(path, "<i8", len(array), offset)
    assert len(found) == len(array)
    assert found[slice(*where)].tolist() == array[slice(*where)].tolist()
    for side in ("left", "right"):
        assert found.searchsorted(value, side) == array.searchsorted(value, side)  # type: ignore[arg-type]


def test_an_array_file_that_is_gone_or_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with pytest.raises(DataError, match=r"tokens\.bin cannot be read: No such file"):
        ArrayFile(path, "<u2", 4)[0:4]
    path.write_bytes(b"abcd")
    with pytest.raises(DataError, match="has become shorter since it was opened"):
        ArrayFile(path, "<u2", 4)[1:4]
    with pytest.raises(DataError, match="has become shorter since it was opened"):
        ArrayFile(path, "<u2", 4).searchsorted(1 << 16)


def test_an_array_file_keeps_no_file_open(tmp_path: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    np.arange(100).tofile(tmp_path / "tokens.bin")
    opened = [ArrayFile(tmp_path / "tokens.bin", "<i8", 100) for _ in range(50)]
    read = [array[10:20] for array in opened]
    assert [array.searchsorted(7) for array in opened] == [7] * 50
    assert len(os.listdir("/proc/self/fd")) == files
    assert all(one.base is None or not isinstance(one.base, np.memmap) for one in read)
