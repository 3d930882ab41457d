"""Corpora that other programs have tokenized: arrays of tokens in `.bin` and `.npy` files.

    .npy                    an array of whole numbers
    .bin                    tokens only, of the dtype that the configuration gives
    .bin with a header      of GPT-2 trainers: 256 int32, of which the first is a magic number
    .bin beside an .idx     of Megatron: the index has the dtype, and where documents end

Several files, of a folder or a glob, are one corpus, in the order of their paths.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.app.data.array_file import ArrayFile
from plait.app.data.document_sources import source_files
from plait.app.data.token_shards import Corpus, TokenShard
from plait.errors import DataError
from plait.files import open_file

_ARRAYS = frozenset({".bin", ".npy"})
_HEADER = 256 * 4
_LOOKED_AT, _FEWEST = 1 << 14, 64
"""Tokens by which the dtype of a file without a header is judged, at most and at least."""
_LARGEST_HALF = 7
"""The largest upper half of a 32-bit token, in vocabularies of up to half a million."""
_OF_MAGIC = {20240520: "<u2", 20240801: "<u4"}
"""Dtypes by the first number of a GPT-2 trainer's header."""
_NUMPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\x00\x00"
_OF_CODE = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtypes by Megatron's number for each."""


def holds_tokens(source: str) -> bool:
    """Return whether `data.source` names token arrays rather than text."""
    path = Path(source).expanduser()
    if path.suffix.lower() in _ARRAYS:
        return True
    names = [one.suffix.lower() for one in path.iterdir() if one.is_file()] if path.is_dir() else []
    return bool(_ARRAYS & set(names)) and set(names) <= _ARRAYS | {".idx"}


def open_tokens(source: str, dtype: str) -> Corpus:
    """Open the token arrays of a file, folder or glob; `dtype`: of `.bin` files without a header.

    Raises `DataError` when one is missing, empty, damaged, or no one-dimensional array of integers.
    """
    paths = [path for path in source_files(source) if path.suffix.lower() in _ARRAYS]
    return Corpus([_shard(path, dtype) for path in paths])


def _shard(path: Path, dtype: str) -> TokenShard:
    """Return the tokens of one file, which says by its name or first bytes how it is written."""
    if path.suffix.lower() == ".npy":
        return _npy(path)
    if path.with_suffix(".idx").is_file():
        return _megatron(path)
    first = _first_bytes(path, 4)
    if len(first) == 4 and struct.unpack("<i", first)[0] in _OF_MAGIC:
        return _with_header(path)
    tokens = _checked(path, dtype, 0, None)
    _require_dtype(path, dtype, tokens[:_LOOKED_AT])
    return TokenShard(tokens, None)


def _npy(path: Path) -> TokenShard:
    first = _first_bytes(path, len(_NUMPY))
    if first.startswith(b"PK"):
        raise DataError(f"data.source: {path} is an archive of arrays: save the tokens as one .npy array.")
    if first != _NUMPY:
        raise DataError(f"data.source: {path} cannot be read as a .npy array: it does not begin as one.")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises many types for an invalid header
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"data.source: {path} cannot be read as a .npy array: {reason}.") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"data.source: {path} holds {tokens.dtype} of shape {tokens.shape}: "
            "save the tokens as whole numbers in one dim."
        )
    return TokenShard(_checked(path, tokens.dtype.str, tokens.offset, len(tokens)), None)


def _require_dtype(path: Path, dtype: str, first: NDArray[np.unsignedinteger]) -> None:
    """Raise DataError if every second token looks like the upper half of a number of twice the bytes."""
    lower, upper = first[::2], first[1::2]
    if len(first) >= _FEWEST and int(upper.max()) <= _LARGEST_HALF < int(lower.max()):
        double = {"uint16": "32", "uint32": "64"}[dtype]
        remedy = 'set data.dtype to "uint32"' if dtype == "uint16" else "write the tokens again as uint32"
        raise DataError(
            f"data.source: every second {dtype} in {path} is nearly 0, as in {double}-bit numbers: {remedy}."
        )


def _with_header(path: Path) -> TokenShard:
    header = _first_bytes(path, _HEADER)
    if len(header) < _HEADER:
        raise DataError(f"data.source: {path} ends within its header: it is damaged.")
    magic, _, count = struct.unpack("<3i", header[:12])
    if count < 1:
        raise DataError(
            f"data.source: {path} has {count:,} tokens by its header, which is damaged: write the file again."
        )
    return TokenShard(_checked(path, _OF_MAGIC[magic], _HEADER, count), None)


def _megatron(path: Path) -> TokenShard:
    """Open tokens with Megatron's index: lengths of sequences, and the sequences that each document has."""
    index = path.with_suffix(".idx")
    _first_bytes(index, 1)
    try:
        data = np.memmap(index, "u1", "r")
        magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", bytes(data[:34]))
        if (magic, version) != (_MEGATRON, 1) or len(data) < 34 + 12 * sequences + 8 * documents:
            raise ValueError
        sizes = np.frombuffer(data, "<i4", sequences, 34)
        firsts = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)  # behind lengths and positions
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if (sizes < 0).any() or (firsts < 0).any() or (np.diff(firsts) < 0).any():
            raise ValueError
        ends = bounds[firsts[1:]]
        kind = _OF_CODE[code]
    except (struct.error, ValueError, KeyError, IndexError, OSError):
        raise DataError(f"data.source: {index} is no index of Megatron's, or damaged.") from None
    not_empty = np.diff(ends, prepend=0) > 0
    return TokenShard(_checked(path, kind, 0, int(bounds[-1])), ends[not_empty])


def _first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, or all of a shorter one. Raises DataError where there is none."""
    try:
        with open_file(path) as file:
            return file.read(count)
    except OSError as error:
        raise DataError(f"data.source: {path} cannot be read: {error.strerror}.") from None


def _checked(path: Path, dtype: str, offset: int, count: int | None) -> ArrayFile:
    """Return the tokens of a file after `offset` bytes; `count` of them, or as many as there are."""
    size = path.stat().st_size - offset
    if size <= 0:
        raise DataError(f"data.source: {path} is empty: give token arrays with tokens in them.")
    if count is None and size % np.dtype(dtype).itemsize:
        raise DataError(
            f"data.source: {path} has {size} bytes, which is no whole number of {dtype} tokens: "
            "set data.dtype to the type it was written with."
        )
    if count is not None and size < count * np.dtype(dtype).itemsize:
        raise DataError(
            f"data.source: {path} has fewer than the {count:,} tokens of its header: write it again."
        )
    return ArrayFile(path, dtype, size // np.dtype(dtype).itemsize if count is None else count, offset)
