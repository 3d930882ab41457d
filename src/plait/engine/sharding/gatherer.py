"""The all-gather of parameters before layers use them, and their release afterwards.

Weights of linears in float8 are cast before they are gathered, with scales computed once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.engine.sharding.flat_buffer import FlatBuffer, allocate_storage
from plait.engine.sharding.float8_matrices import ScaledMatrices, scale_together
from plait.engine.sharding.unit import Unit
from plait.ranks.accelerator import copy_later, synchronize_stream
from plait.ranks.collectives import all_gather
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.schedules.lowering.program import (
    AwaitParameters,
    ComputeScales,
    Finish,
    GatherParameters,
    ReleaseParameters,
)


class Gatherer:
    """All-gathers the parameters that layers use from the shards that the ranks' optimizers update."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self.gathered: set[str] = set()
        """The units whose parameters are whole, or being gathered, from shards as they are now."""
        self._buffers = [buffer for unit in units.values() for buffer in unit.buffers]
        self._pending: dict[str, list[tuple[Handle[Tensor], FlatBuffer]]] = {}
        self._unscaled: list[ScaledMatrices] = []
        """Those whose scales are of earlier shards."""
        self._stale: list[tuple[Handle[Tensor], FlatBuffer]] = []
        """All-gathers of a failed step, to whose output a backend may still write."""
        self.observer: Callable[[FlatBuffer], None] | None = None
        """Called with each buffer whose parameters have been gathered."""
        self._read_by_device = [buffer.whole.device for buffer in self._buffers if buffer.is_read_by_device]

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return by type of instruction (scales, gather, await, release, finish) the method that runs it."""
        return {
            ComputeScales: lambda i: self.compute_scales(),
            GatherParameters: lambda i: self.gather(i.unit),
            AwaitParameters: lambda i: self.wait(i.unit),
            ReleaseParameters: lambda i: self.release(i.unit),
            Finish: lambda i: self.finish(),
        }

    def begin(self) -> None:
        """Begin a step: mark parameters as not gathered, and copy back offloaded shards that were updated.

        Raises PlanError where the `.data` of one of the optimizer's parameters was replaced.
        """
        self.gathered = set()
        for handle, buffer in self._stale:
            handle.wait()
            buffer.release_parameters()
        self._stale = []
        self._unscaled = [buffer.scaled for buffer in self._buffers if buffer.scaled is not None]
        for buffer in self._buffers:
            buffer.check_data()
            buffer.share_data()
            if buffer.scaled is not None:
                buffer.scaled.find_largest(buffer.latest_shard)
            buffer.copy_back()

    def finish(self) -> None:
        """Copy offloaded parameters to the device that updates them; if the CPU does, wait for GPU reads."""
        for buffer in self._buffers:
            buffer.copy_to_device()
        for device in self._read_by_device[:1]:  # the optimizer's step, on the CPU, does not wait for copies
            synchronize_stream(device)

    def compute_scales(self) -> None:
        """Compute the scales of all matrices that are gathered in float8, if shards have changed since.

        Communication: as `scale_together`.
        """
        scale_together(self._unscaled)
        self._unscaled = []

    def gather(self, name: str) -> None:
        """Start the all-gathers of the parameters of the unit `name`, unless they are gathered already."""
        if name in self.gathered:
            return
        self.gathered.add(name)
        pending = self._pending[name] = []
        for buffer in self.units[name].buffers:
            if not buffer.spec.has_own_parameters:
                continue
            handle = _gather(buffer)
            if handle is not None:
                pending.append((handle.about(f"parameters of {name or 'the model'}"), buffer))
            elif self.observer is not None:
                self.observer(buffer)

    def wait(self, name: str) -> None:
        """Wait for the all-gathers of the parameters of the unit `name`."""
        for handle, buffer in self._pending.pop(name, ()):
            handle.wait()
            if self.observer is not None:
                self.observer(buffer)

    def release(self, name: str) -> None:
        """Free the whole parameters of the unit `name`, unless they stay allocated under the plan."""
        self.gathered.discard(name)
        for buffer in self.units[name].buffers:
            buffer.release_parameters()

    def clear(self) -> None:
        """After an exception in a step, abandon pending all-gathers and free gathered parameters."""
        self.gathered, self.observer = set(), None
        for started in self._pending.values():
            self._stale += [(handle, buffer) for handle, buffer in started if not handle.abandon()]
        self._pending.clear()
        still_written = [buffer for _, buffer in self._stale]
        for buffer in self._buffers:
            if buffer in still_written:
                buffer.detach()
            else:
                buffer.release_parameters()
        self.finish()


@torch.no_grad()
def _gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
    """Start the all-gather of a buffer's sharded parameters; return None where they are not sharded.

    A shard is read where it is; one of another dtype or device is first copied to its part of `whole`.
    """
    allocate_storage(buffer.whole)
    own, shard, group = buffer.own, buffer.shard, buffer.shard_group
    if buffer.scaled is not None:
        buffer.scaled.cast(shard, own)
        return None if group is None else _gather_bytes(buffer.whole, own, group)
    if group is None or shard.dtype != own.dtype or shard.device != own.device:
        if buffer.spec.shard is not None:
            copy_later(own, shard)
        shard = own
    return None if group is None else all_gather(shard, group, out=buffer.whole, checked=False)


def _gather_bytes(whole: Tensor, own: Tensor, group: Group) -> Handle[Tensor]:
    """Start the all-gather of float8 tensors, viewed as uint8, which every backend can communicate."""
    return all_gather(own.view(torch.uint8), group, out=whole.view(torch.uint8), checked=False)
