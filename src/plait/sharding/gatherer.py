"""Gathering parameters before layers use them, and letting go of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_gather
from plait.comm.handle import Handle
from plait.schedules.program import AwaitParameters, GatherParameters, ReleaseParameters
from plait.sharding.buffer import FlatBuffer, give_room_back, make_room
from plait.sharding.unit import Unit


class Gatherer:
    """Fills what layers use from what the optimizers of all ranks have updated."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self._under_way: dict[str, list[Handle[Tensor]]] = {}
        self._current: set[str] = set()
        """Units whose kept parameters are as the pieces are."""

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What each instruction about units does."""
        return {
            GatherParameters: lambda i: self.gather(i.unit),
            AwaitParameters: lambda i: self.wait(i.unit),
            ReleaseParameters: lambda i: self.release(i.unit),
        }

    def begin(self) -> None:
        """Pieces may have changed since the last step."""
        self._current.clear()

    def gather(self, name: str) -> None:
        """Start filling a unit's parameters, unless they are there."""
        if name in self._current:
            return
        self._current.add(name)
        self._under_way[name] = [
            handle
            for buffer in self.units[name].buffers
            if buffer.has_pieces and (handle := _gather(buffer)) is not None
        ]

    def wait(self, name: str) -> None:
        """Wait until they are there."""
        for handle in self._under_way.pop(name, ()):
            handle.wait()

    def release(self, name: str) -> None:
        """Give the memory back of what is not kept."""
        self._current.discard(name)
        for buffer in self.units[name].buffers:
            if not buffer.keeps_whole:
                give_room_back(buffer.whole)

    def clear(self) -> None:
        """After an exception in the middle of a step: nothing is gathered, nothing is under way."""
        self._under_way.clear()
        for name in self.units:
            self.release(name)


@torch.no_grad()
def _gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
    """Start filling a buffer. The gather lands where the layers look, so this rank's own piece goes first."""
    make_room(buffer.whole)
    own = buffer.own
    if own.data_ptr() != buffer.piece.data_ptr():
        own.copy_(buffer.piece, non_blocking=True)
    if buffer.shard is None:
        return None
    return all_gather(own, buffer.shard, out=buffer.whole, checked=False)
