"""The boxes of a rank's pieces, written directly or from a CPU copy so that training can continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plait.checkpoint.rank_contents import RankPiece
from plait.checkpoint.tensor_file import DTYPES, BoxToWrite
from plait.errors import CheckpointError
from plait.layout import Box
from plait.layout.boxes import piece_boxes


@dataclass(frozen=True)
class LocalBox:
    """A box of a global tensor in a rank's memory."""

    name: str
    box: Box
    view: Tensor


def local_boxes(pieces: Iterable[RankPiece], coordinate: Mapping[str, int]) -> list[LocalBox]:
    """Return the boxes of pieces as views. Raises CheckpointError for a dtype that files cannot store."""
    found = []
    for piece in pieces:
        if piece.piece.dtype not in DTYPES:
            raise CheckpointError(f"{piece.name} is {piece.piece.dtype}, which no safetensors file can hold.")
        for part in piece_boxes(piece.layout, coordinate):
            found.append(LocalBox(piece.name, part.box, part.view_of(piece.piece)))
    return found


def unstaged(boxes: Iterable[LocalBox]) -> list[BoxToWrite]:
    """Return the boxes to be written without staging: each is copied to the CPU when it is written."""
    return [BoxToWrite(one.name, one.box, one.view.dtype, one.view.cpu) for one in boxes]


class StagingBuffer:
    """CPU memory for copies of a checkpoint's boxes, reused by the next checkpoint to save time.

    For CUDA tensors it is pinned, and the copies are asynchronous on the current stream.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return self._memory.nbytes

    def stage(self, boxes: Sequence[LocalBox]) -> list[BoxToWrite]:
        """Copy the boxes and return the copies; they are valid until the next call."""
        on_device = any(one.view.is_cuda for one in boxes)
        self._allocate(sum(_aligned_bytes(one) for one in boxes), pinned=on_device)
        items, start = [], 0
        copied = torch.Event("cuda") if on_device else None
        for one in boxes:
            flat = self._memory[start : start + one.view.nbytes].view(one.view.dtype)
            copy = flat.view(one.view.shape)
            copy.copy_(one.view, non_blocking=True)
            items.append(BoxToWrite(one.name, one.box, copy.dtype, partial(_after, copied, copy)))
            start += _aligned_bytes(one)
        if copied is not None:
            copied.record()
        return items

    def _allocate(self, size: int, *, pinned: bool) -> None:
        if self._memory.nbytes < size or self._memory.is_pinned() != pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _aligned_bytes(one: LocalBox) -> int:
    """Return the size of a box, rounded up to the alignment of the largest dtype."""
    return -(-one.view.nbytes // 16) * 16


def _after(event: torch.Event | None, copy: Tensor) -> Tensor:
    """Block until `event`, if any, has completed, and return `copy`."""
    if event is not None:
        with torch.cuda.device(event.device):  # a new thread starts on device 0
            event.synchronize()
    return copy
