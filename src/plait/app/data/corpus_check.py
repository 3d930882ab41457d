"""Checks that the files of a prepared corpus are undamaged, by size and by checksum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plait.app.data.corpus_index import REMEDY, CorpusIndex, ShardEntry, shard_paths
from plait.app.data.recorded_tokenizer import FOLDER, files_hash
from plait.app.data.whole_files import file_checksum
from plait.errors import DataError


def require_intact(folder: Path, index: CorpusIndex, most: int | None = None) -> None:
    """Raise DataError for the first damaged file of a corpus, by the checksums in its index.

    `most`: the bytes that are read; None: all. Files of earlier versions have no checksums.
    """
    if index.tokenizer_hash and files_hash(str(folder / FOLDER)) != index.tokenizer_hash:
        raise DataError(f"{folder / FOLDER} has not the files of the tokenizer that were written: {REMEDY}.")
    read = 0
    for number, entry in enumerate(index.shards):
        for path, checksum in zip(shard_paths(folder, number, index.chats), entry.checksums, strict=False):
            read += path.stat().st_size if path.is_file() else 0
            if most is not None and read > most:
                return
            if reason := _difference(path, checksum):
                raise DataError(f"{path} {reason}: {REMEDY}.")


def damaged_shards(folder: Path, index: CorpusIndex) -> Iterator[int]:
    """Yield the numbers of the shards of which a file is missing or damaged, by size and checksum."""
    for number, entry in enumerate(index.shards):
        if not is_whole(folder, number, entry, index.dtype, index.chats) or any(
            _difference(path, checksum)
            for path, checksum in zip(shard_paths(folder, number, index.chats), entry.checksums, strict=False)
        ):
            yield number


def is_whole(folder: Path, number: int, entry: ShardEntry, dtype: str, chats: bool) -> bool:
    """Return whether all files of a shard are there, with the size that its counts give."""
    itemsizes = np.dtype(dtype).itemsize, 8, 1, 4
    counts = entry.tokens, entry.documents, entry.tokens, entry.documents
    return all(
        path.is_file() and path.stat().st_size == itemsize * count
        for path, itemsize, count in zip(shard_paths(folder, number, chats), itemsizes, counts, strict=False)
    )


def _difference(path: Path, checksum: str) -> str:
    """Return in words how a file differs from what was written, "" where it does not."""
    try:
        return "" if file_checksum(path) == checksum else "is not what was written, by its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
