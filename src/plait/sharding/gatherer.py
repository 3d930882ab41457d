"""Gathering parameters before layers use them, and letting go of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_gather
from plait.comm.handle import Handle
from plait.schedules.program import AwaitParameters, Finish, GatherParameters, ReleaseParameters
from plait.sharding.flat_buffer import FlatBuffer, allocate_storage, free_storage
from plait.sharding.unit import Unit


class Gatherer:
    """Fills what layers use from what the optimizers of all ranks have updated."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self._under_way: dict[str, list[tuple[Handle[Tensor], FlatBuffer]]] = {}
        self._stale: list[tuple[Handle[Tensor], FlatBuffer]] = []
        """Of a step that failed: what a backend may still be writing to."""
        self._current: set[str] = set()
        """Units whose kept parameters are as the pieces are."""
        self._read_by_device = any(buffer.is_read_by_device for buffer in self._buffers())

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What each instruction about units does."""
        return {
            GatherParameters: lambda i: self.gather(i.unit),
            AwaitParameters: lambda i: self.wait(i.unit),
            ReleaseParameters: lambda i: self.release(i.unit),
            Finish: lambda i: self.finish(),
        }

    def begin(self) -> None:
        """Pieces may have changed since the last step."""
        self._current.clear()
        for handle, buffer in self._stale:
            handle.wait()
            _release(buffer)
        self._stale = []
        for buffer in self._buffers():
            buffer.refuse_other_data()
            buffer.lead_twins()
            buffer.leave_device()

    def finish(self) -> None:
        """After a step: what the optimizer updates lies where its gradients are, and nobody reads it."""
        for buffer in self._buffers():
            buffer.return_to_device()
        if self._read_by_device:  # the optimizer's step, on the CPU, does not wait for copies to the device
            torch.cuda.current_stream().synchronize()

    def gather(self, name: str) -> None:
        """Start filling a unit's parameters, unless they are there."""
        if name in self._current:
            return
        self._current.add(name)
        self._under_way[name] = [
            (handle.about(f"parameters of {name or 'the model'}"), buffer)
            for buffer in self.units[name].buffers
            if buffer.has_pieces and (handle := _gather(buffer)) is not None
        ]

    def wait(self, name: str) -> None:
        """Wait until they are there."""
        for handle, _ in self._under_way.pop(name, ()):
            handle.wait()

    def release(self, name: str) -> None:
        """Give the memory back of what is not kept."""
        self._current.discard(name)
        for buffer in self.units[name].buffers:
            _release(buffer)

    def clear(self) -> None:
        """After an exception in the middle of a step: nothing is gathered any more."""
        for started in self._under_way.values():
            self._stale += [(handle, buffer) for handle, buffer in started if not handle.abandon()]
        self._under_way.clear()
        self._current.clear()
        still_written = [buffer for _, buffer in self._stale]
        for buffer in self._buffers():
            if buffer in still_written:
                buffer.step_aside()
            else:
                _release(buffer)
        self.finish()

    def _buffers(self) -> Iterator[FlatBuffer]:
        for unit in self.units.values():
            yield from unit.buffers


def _release(buffer: FlatBuffer) -> None:
    if not buffer.keeps_whole:
        free_storage(buffer.whole)


@torch.no_grad()
def _gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
    """Start filling a buffer. The gather lands where the layers look, so this rank's own piece goes first."""
    allocate_storage(buffer.whole)
    own = buffer.own
    if own.data_ptr() != buffer.piece.data_ptr():
        own.copy_(buffer.piece, non_blocking=True)
    if buffer.shard is None:
        return None
    return all_gather(own, buffer.shard, out=buffer.whole, checked=False)
