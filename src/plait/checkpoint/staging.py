"""Boxes of what a rank holds, where they lie; or copied, so that the next step may go on meanwhile."""

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
    """A box in a rank's memory."""

    name: str
    box: Box
    view: Tensor


def chunk_boxes(held: Iterable[RankPiece], coordinate: Mapping[str, int]) -> list[LocalBox]:
    """The boxes that pieces are made of, as views of them. CheckpointError for a dtype no file can hold."""
    found = []
    for one in held:
        if one.piece.dtype not in DTYPES:
            raise CheckpointError(f"{one.name} is {one.piece.dtype}, which no safetensors file can hold.")
        for part in piece_boxes(one.layout, coordinate):
            found.append(LocalBox(one.name, part.box, part.view_of(one.piece)))
    return found


def unstaged(boxes: Iterable[LocalBox]) -> list[BoxToWrite]:
    """To be read from where they lie, one by one."""
    return [BoxToWrite(one.name, one.box, one.view.dtype, one.view.cpu) for one in boxes]


class Staging:
    """Memory for copies of a checkpoint's boxes. It is kept for the next one: fresh memory costs more time.

    On CUDA it is pinned, and copies run in the order of the stream: the host does not wait for them.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """How large it is."""
        return self._memory.nbytes

    def copied(self, boxes: Sequence[LocalBox]) -> list[BoxToWrite]:
        """The boxes as they are now; valid until this is called again, and read when they are there."""
        on_device = any(one.view.is_cuda for one in boxes)
        self._make_room(sum(_room(one) for one in boxes), pinned=on_device)
        items, place = [], 0
        arrived = torch.Event("cuda") if on_device else None
        for one in boxes:
            flat = self._memory[place : place + one.view.nbytes].view(one.view.dtype)
            copy = flat.view(one.view.shape)
            copy.copy_(one.view, non_blocking=True)
            items.append(BoxToWrite(one.name, one.box, copy.dtype, partial(_when, copy, arrived)))
            place += _room(one)
        if arrived is not None:
            arrived.record()
        return items

    def _make_room(self, size: int, *, pinned: bool) -> None:
        if self._memory.nbytes < size or self._memory.is_pinned() != pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before there is new memory
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _room(one: LocalBox) -> int:
    """Bytes, up to where any dtype may begin."""
    return -(-one.view.nbytes // 16) * 16


def _when(copy: Tensor, arrived: torch.Event | None) -> Tensor:
    if arrived is not None:
        with torch.cuda.device(arrived.device):  # a thread begins on the first one
            arrived.synchronize()
    return copy
