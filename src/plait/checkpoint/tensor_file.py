"""One safetensors file: written box by box, with checksums; looked through for damage; read box by box.

The format is that of the safetensors library, which reads the boxes. Writing is done here, since the library
first makes a copy of all tensors in memory: here one box at a time is on its way, from where it lies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.disk import Disk
from plait.checkpoint.manifest import FileEntry, StoredBox, checksum, key_of
from plait.errors import CheckpointError
from plait.layout import Box

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format has a word for."""
CHUNK = 1 << 22
"""Bytes that are written, or looked at, at once."""
BETWEEN_SYNCS = 1 << 28
"""Bytes: whoever waits sees a file grow as fast as the disk is, and little is left to be waited for."""


@dataclass(frozen=True)
class BoxToWrite:
    """A box to be written."""

    tensor: str
    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Gives it, when its turn comes, on the CPU."""
    called: str | None = None
    """Its name in the file; None: that of a box."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        return key_of(self.tensor, self.box) if self.called is None else self.called

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.box.sizes) * self.dtype.itemsize


def write_file(
    path: Path, items: Sequence[BoxToWrite], disk: Disk, about: Mapping[str, str] | None = None
) -> FileEntry:
    """Write `items` into a new file, and give what a manifest says of it. Raises OSError.

    On return all bytes are on the disk; memory beside the items: none, but where one is not contiguous.
    """
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # so each begins at a multiple of its size
    header = _header(ordered, about or {})
    boxes: list[StoredBox] = []
    place, waiting = len(header), 0
    with disk.create(path) as file:
        disk.write(file, memoryview(header))
        for item in ordered:
            told = 0
            for chunk in _chunks(item.read()):
                told = zlib.crc32(chunk, told)
                disk.write(file, chunk)
                waiting += len(chunk)
                if waiting >= BETWEEN_SYNCS:
                    disk.sync(file)
                    waiting = 0
                    path.stat()  # FileNotFoundError: who removed it needs it no more
            boxes.append(StoredBox(item.tensor, item.box.offsets, item.box.sizes, place, f"{told:08x}"))
            place += item.bytes
        disk.sync(file)
    return FileEntry(path.name, place, checksum(header), tuple(boxes))


@dataclass(frozen=True)
class Portion:
    """Some of the boxes of a file, to be looked through."""

    file: FileEntry
    boxes: range


def portions(files: Sequence[FileEntry], most: int = BETWEEN_SYNCS) -> list[Portion]:
    """All files, in portions of at most `most` bytes, or of one box."""
    found = []
    for file in files:
        stops, first = list(_stops(file)), 0
        for number in range(len(stops)):
            if number > first and stops[number] - file.boxes[first].start > most:
                found.append(Portion(file, range(first, number)))
                first = number
        found.append(Portion(file, range(first, len(stops))))
    return found


def damage(folder: Path, portion: Portion) -> str | None:
    """What is wrong with a file, as the end of a sentence about it; None: nothing.

    Its size and header, and the boxes of the portion, each of which is read once.
    """
    file = portion.file
    path = folder / file.name
    try:
        with path.open("rb", buffering=0) as opened:
            size = path.stat().st_size
            if size != file.bytes:
                return f"has {size:,} bytes and not {file.bytes:,}"
            first = min((box.start for box in file.boxes), default=file.bytes)
            if _checksum(opened, first) != file.header:
                return "has a damaged header"
            stops = list(_stops(file))
            for number in portion.boxes:
                box, stop = file.boxes[number], stops[number]
                opened.seek(box.start)
                if _checksum(opened, stop - box.start) != box.checksum:
                    return f"has a damaged {box.key}"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


class TensorFileReader:
    """Reads parts of boxes from the files of a checkpoint, each of which is opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}

    def read(
        self, file: str, key: str, within: tuple[slice, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """A part of a box, on the CPU: new memory for that part alone.

        CheckpointError where it cannot be read, and where it is of another dtype than `dtype`, if given.
        """
        with self._open(file) as opened:
            found: Tensor = opened.get_slice(key)[within] if within else opened.get_tensor(key)
        if dtype is not None and found.dtype != dtype:
            raise CheckpointError(
                f"{self._folder / file} holds {key} as {found.dtype}, where the manifest says {dtype}: take "
                "another checkpoint."
            )
        return found

    def known(self, file: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is in a file, by key. CheckpointError."""
        kinds = {word: dtype for dtype, word in DTYPES.items()}
        found = {}
        with self._open(file) as opened:
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                one = opened.get_slice(key)
                if one.get_dtype() not in kinds:
                    raise CheckpointError(
                        f"{self._folder / file} holds {key} as {one.get_dtype()}, which plait does not read: "
                        "convert it."
                    )
                found[key] = tuple(one.get_shape()), kinds[one.get_dtype()]
        return found

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            yield self._opened[file]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder / file} cannot be read ({error}): take another checkpoint."
            ) from None


def _header(items: Sequence[BoxToWrite], about: Mapping[str, str]) -> bytes:
    told: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    place = 0
    for item in items:
        told[item.key] = {
            "dtype": DTYPES[item.dtype],
            "shape": item.box.sizes,
            "data_offsets": [place, place + item.bytes],
        }
        place += item.bytes
    text = json.dumps(told, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    # Through a view of bytes, since NumPy has no bfloat16.
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _stops(file: FileEntry) -> Iterator[int]:
    """Where each box ends: where the next one begins."""
    yield from (box.start for box in file.boxes[1:])
    if file.boxes:
        yield file.bytes


def _checksum(opened: Any, size: int) -> str:
    buffer, told = memoryview(bytearray(min(CHUNK, max(1, size)))), 0
    while size > 0:
        count = opened.readinto(buffer[: min(CHUNK, size)])
        if not count:
            break
        told = zlib.crc32(buffer[:count], told)
        size -= count
    return f"{told:08x}"
