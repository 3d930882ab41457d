"""The all-gather of parameters before layers use them, and their release afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from plait.engine.sharding.flat_buffer import FlatBuffer, allocate_storage, free_storage
from plait.engine.sharding.unit import Unit
from plait.ranks.collectives import all_gather
from plait.ranks.device import copy_later, synchronize_stream
from plait.ranks.handle import Handle
from plait.schedules.lowering.program import AwaitParameters, Finish, GatherParameters, ReleaseParameters


class ParameterState(Enum):
    """Whether a unit's parameters are sharded, being gathered, or whole.

    from         to           by
    SHARDED      GATHERING    gather: the all-gather has started
    GATHERING    WHOLE        wait: layers may use the parameters
    WHOLE        SHARDED      release; begin, because the optimizer may have updated the shards
    any          SHARDED      clear: the step has failed
    """

    SHARDED = 1
    GATHERING = 2
    WHOLE = 3


class Gatherer:
    """All-gathers the parameters that layers use from the shards that the ranks' optimizers update."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self.states = dict.fromkeys(units, ParameterState.SHARDED)
        self._buffers = [buffer for unit in units.values() for buffer in unit.buffers]
        self._pending: dict[str, list[tuple[Handle[Tensor], FlatBuffer]]] = {}
        self._stale: list[tuple[Handle[Tensor], FlatBuffer]] = []
        """All-gathers of a failed step, to whose output a backend may still write."""
        self._read_by_device = [buffer.whole.device for buffer in self._buffers if buffer.is_read_by_device]

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return a dict from instruction type (gather, await, release, finish) to the method that runs it."""
        return {
            GatherParameters: lambda i: self.gather(i.unit),
            AwaitParameters: lambda i: self.wait(i.unit),
            ReleaseParameters: lambda i: self.release(i.unit),
            Finish: lambda i: self.finish(),
        }

    def begin(self) -> None:
        """Begin a step: mark all parameters as not gathered, since optimizers may have updated the shards."""
        self.states = dict.fromkeys(self.units, ParameterState.SHARDED)
        for handle, buffer in self._stale:
            handle.wait()
            _release(buffer)
        self._stale = []
        for buffer in self._buffers:
            buffer.check_data()
            buffer.share_data()
            buffer.copy_back()

    def finish(self) -> None:
        """Copy offloaded parameters to the device that updates them; if the CPU does, wait for GPU reads."""
        for buffer in self._buffers:
            buffer.copy_to_device()
        for device in self._read_by_device[:1]:  # the optimizer's step, on the CPU, does not wait for copies
            synchronize_stream(device)

    def gather(self, name: str) -> None:
        """Start the all-gathers of a unit's parameters, unless they are gathered already."""
        if self.states[name] is not ParameterState.SHARDED:
            return
        self.states[name] = ParameterState.GATHERING
        self._pending[name] = [
            (handle.about(f"parameters of {name or 'the model'}"), buffer)
            for buffer in self.units[name].buffers
            if buffer.spec.has_own_parameters and (handle := _gather(buffer)) is not None
        ]

    def wait(self, name: str) -> None:
        """Wait for the all-gathers of a unit's parameters."""
        if self.states[name] is ParameterState.GATHERING:
            self.states[name] = ParameterState.WHOLE
            for handle, _ in self._pending.pop(name):
                handle.wait()

    def release(self, name: str) -> None:
        """Free the whole parameters of a unit, unless they stay allocated under the plan."""
        self.states[name] = ParameterState.SHARDED
        for buffer in self.units[name].buffers:
            _release(buffer)

    def clear(self) -> None:
        """After an exception in a step, abandon pending all-gathers and free gathered parameters."""
        self.states = dict.fromkeys(self.units, ParameterState.SHARDED)
        for started in self._pending.values():
            self._stale += [(handle, buffer) for handle, buffer in started if not handle.abandon()]
        self._pending.clear()
        still_written = [buffer for _, buffer in self._stale]
        for buffer in self._buffers:
            if buffer in still_written:
                buffer.detach()
            else:
                _release(buffer)
        self.finish()


def _release(buffer: FlatBuffer) -> None:
    if not buffer.spec.whole.kept:
        free_storage(buffer.whole)


@torch.no_grad()
def _gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
    """Start the all-gather of a buffer's sharded parameters; return None where they are not sharded.

    A shard is read where it is; one of another dtype or device is first copied to its part of `whole`.
    """
    allocate_storage(buffer.whole)
    own, shard, group = buffer.own, buffer.shard, buffer.shard_group
    if group is None or shard.dtype != own.dtype or shard.device != own.device:
        if buffer.spec.shard is not None:
            copy_later(own, shard)
        shard = own
    return None if group is None else all_gather(shard, group, out=buffer.whole, checked=False)
