"""Sources of text: Python's own standard library, a file, a folder, or a glob."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from plait.app.data.text_files import not_text_remedy
from plait.errors import DataError
from plait.files import read_bytes

STDLIB_BYTES = 20_000_000  # about the whole library; a bound in case an installation is unusual
_SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests", "idlelib"})


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
