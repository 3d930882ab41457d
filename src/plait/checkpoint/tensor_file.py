"""One safetensors file: write it box by box with checksums, check it for damage, read parts of its boxes.

The safetensors library reads the boxes. It does not write them, since it would first copy all tensors in
memory; `write_file` holds one box at a time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.manifest import FileEntry, StoredBox, TensorEntry, checksum, key_of
from plait.errors import CheckpointError
from plait.files import open_file, require_file
from plait.plan.layout.layout import Box

T = TypeVar("T")

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
"""Names of dtypes in the file format."""
CHUNK = 1 << 22
"""Bytes per write or read call."""
BETWEEN_SYNCS = 1 << 28
"""Bytes between two syncs: waiting ranks see the file grow steadily, and the last sync is short."""

_FILE_ROOM, _ENTRY_ROOM, _DIM_ROOM = 128, 100, 21
"""Most bytes of a header: its frame, a tensor's entry without the name, and each dim of the tensor."""


@dataclass(frozen=True)
class BoxToWrite:
    """A box (a range per dim) of a global tensor, with a function that reads its values, to be written."""

    tensor: str
    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns the values on the CPU; called when the box is written."""
    name: str | None = None
    """The name in the file; None: that of tensor and box."""

    @property
    def key(self) -> str:
        """The name of the box in the file."""
        return key_of(self.tensor, self.box) if self.name is None else self.name

    @property
    def bytes(self) -> int:
        """The size of the box in the file, in bytes."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """Where boxes lie in a safetensors file."""

    header: bytes
    """All bytes before the first box."""
    items: tuple[BoxToWrite, ...]
    """The boxes, in the order of the file."""
    starts: tuple[int, ...]
    """The position of each box's first byte."""
    bytes: int
    """The size of the file."""

    @staticmethod
    def of(items: Sequence[BoxToWrite], about: Mapping[str, str] | None = None) -> FileLayout:
        """Return the layout of a file that holds `items`, and the text entries `about` in its header."""
        ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # aligns each box to its element size
        header = _header(ordered, about or {})
        starts = list(accumulate((item.bytes for item in ordered), initial=len(header)))
        return FileLayout(header, tuple(ordered), tuple(starts[:-1]), starts[-1])

    def entry(self, name: str, checksums: Sequence[str]) -> FileEntry:
        """Return the manifest entry of the file `name`, given the checksum of each box."""
        parts = zip(self.items, self.starts, checksums, strict=True)
        boxes = (
            StoredBox(item.tensor, item.box.offsets, item.box.sizes, start, found)
            for item, start, found in parts
        )
        return FileEntry(name, self.bytes, checksum(self.header), tuple(boxes))


def write_file(
    path: Path, items: Sequence[BoxToWrite], disk: Disk, about: Mapping[str, str] | None = None
) -> FileEntry:
    """Write `items` to a new file and return its manifest entry. Raises OSError.

    On return all bytes are on the disk. Copies only tensors that are not contiguous.
    """
    layout, checksums, unsynced = FileLayout.of(items, about), list[str](), 0
    with disk.create(path) as file:
        disk.write(file, memoryview(layout.header))
        for item in layout.items:
            crc = 0
            for chunk in chunks_of(item.read()):
                crc = zlib.crc32(chunk, crc)
                disk.write(file, chunk)
                unsynced += len(chunk)
                if unsynced >= BETWEEN_SYNCS:
                    disk.sync(file)
                    unsynced = 0
                    path.stat()  # FileNotFoundError: rank 0 has given up and removed the folder
            checksums.append(f"{crc:08x}")
        disk.sync(file)
    return layout.entry(path.name, checksums)


def write_files(
    folder: Path, stem: str, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> list[FileEntry]:
    """Write `items` to `STEM.safetensors`, or to `STEM-00001-of-00003.safetensors` … of at most `max_bytes`.

    A larger tensor has a file of its own. Raises OSError.
    """
    if max_bytes is not None and max_bytes < 1:
        raise CheckpointError(f"files of at most {max_bytes} bytes hold nothing: give a larger size.")
    groups = [items] if max_bytes is None else grouped(items, _bytes_in_file, max_bytes - _FILE_ROOM)
    files = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        about = {"format": "pt"}  # transformers requires it
        files.append(write_file(folder / f"{stem}{part}.safetensors", group, disk, about))
    return files


def _bytes_in_file(item: BoxToWrite) -> int:
    """Return an upper bound on the bytes that `item` adds to a safetensors file, header entry included."""
    return item.bytes + len(json.dumps(item.key)) + _ENTRY_ROOM + _DIM_ROOM * len(item.box.sizes)


@dataclass(frozen=True)
class Portion:
    """Some of the stored boxes of a file, whose checksums one call of `find_damage` checks."""

    file: FileEntry
    boxes: Sequence[int]
    """Their numbers."""


def portions(files: Sequence[FileEntry]) -> list[Portion]:
    """Divide files' boxes into portions of at most `BETWEEN_SYNCS` bytes; a larger box is alone in one."""
    found: list[Portion] = []
    for file in files:
        sizes = [stop - box.start for box, stop in zip(file.boxes, _stops(file), strict=True)]
        numbers = range(len(sizes))
        found += (Portion(file, part) for part in grouped(numbers, sizes.__getitem__, BETWEEN_SYNCS))
    return found


def grouped(items: Sequence[T], size_of: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide items, in order, into groups of total size at most `most`; a larger item is a group alone."""
    groups: list[list[T]] = [[]]
    room = most
    for item in items:
        if groups[-1] and size_of(item) > room:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= size_of(item)
    return groups


def find_damage(folder: Path, portion: Portion) -> str | None:
    """Check size and header of a file and the checksums of a portion; return the first error, or None.

    The error is the end of a sentence that begins with the file's name.
    """
    file = portion.file
    path = folder / file.name
    try:
        with open_file(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes:
                return f"has {size:,} bytes and not {file.bytes:,}"
            first = min((box.start for box in file.boxes), default=file.bytes)
            if _read_checksum(opened, first) != file.header:
                return "has a damaged header"
            stops = list(_stops(file))
            for number in portion.boxes:
                box, stop = file.boxes[number], stops[number]
                opened.seek(box.start)
                if _read_checksum(opened, stop - box.start) != box.checksum:
                    return f"has a damaged {box.key}"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


class TensorFileReader:
    """Reads stored tensors, or parts of them, from the safetensors files of a folder; opens a file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}

    def read(
        self, file: str, key: str, within: tuple[slice, ...], entry: TensorEntry | None = None
    ) -> Tensor:
        """Return the tensor `key` of a file, or the part `within` these slices, on the CPU in new memory.

        Raises CheckpointError where it cannot be read, or has another shape or dtype than `entry`, if given.
        """
        with self._open(file) as opened:
            stored = opened.get_slice(key)
            shape, found = tuple(stored.get_shape()), stored[within] if within else opened.get_tensor(key)
        assert isinstance(found, Tensor)
        if entry is not None and (shape, found.dtype) != (entry.shape, entry.torch_dtype):
            raise CheckpointError(
                f"{self._folder / file} holds {key} as {found.dtype} {list(shape)}, where the manifest says "
                f"{entry.torch_dtype} {list(entry.shape)}: take another checkpoint."
            )
        return found

    def contents(self, file: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor in a file, by key. Raises CheckpointError."""
        kinds = {name: dtype for dtype, name in DTYPES.items()}
        found = {}
        with self._open(file) as opened:
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
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
                require_file(self._folder / file)
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            yield self._opened[file]
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckpointError(
                f"{self._folder / file} cannot be read ({reason}): take another checkpoint."
            ) from None


def _header(items: Sequence[BoxToWrite], about: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    position = 0
    for item in items:
        entries[item.key] = {
            "dtype": DTYPES[item.dtype],
            "shape": item.box.sizes,
            "data_offsets": [position, position + item.bytes],
        }
        position += item.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on the CPU in views of at most `CHUNK` bytes."""
    # A view of bytes, since NumPy has no bfloat16.
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _stops(file: FileEntry) -> Iterator[int]:
    """Yield the byte position at which each stored box of a file ends."""
    yield from (box.start for box in file.boxes[1:])
    if file.boxes:
        yield file.bytes


def _read_checksum(opened: Any, size: int) -> str:
    buffer, crc = memoryview(bytearray(min(CHUNK, max(1, size)))), 0
    while size > 0:
        count = opened.readinto(buffer[: min(CHUNK, size)])
        if not count:
            break
        crc = zlib.crc32(buffer[:count], crc)
        size -= count
    return f"{crc:08x}"
