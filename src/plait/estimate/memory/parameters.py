"""The memory of parameters, gradients and optimizer state, as instructions gather, reduce and free them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from plait.engine.blueprint import Blueprint
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.estimate.memory.optimizer_state import OptimizerState
from plait.plan.flat_buffer_specs import BufferSpec, FlatSpec
from plait.plan.parameter_units import FLOAT8, FLOAT32, replicas_of
from plait.ranks.transport.shared_memory.transport import STAGING_LIMIT
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    GatherParameters,
    ReduceGradient,
    ReleaseParameters,
    ScatterGradient,
)


@dataclass(frozen=True)
class RankBuffer:
    """A flat buffer of parameters on one rank, and the bytes of the tensors that it allocates."""

    spec: BufferSpec
    device: torch.device
    """The device where layers run."""
    stages: int
    """How many stages of the rank use it: each adds to a gradient of its own."""
    replicas: int
    """How many ranks hold the same parameters, or shards, and sum their gradients."""

    def state_bytes(self, state: OptimizerState) -> int:
        """Return the bytes of optimizer state of this buffer's parameters, on the rank that has most."""
        if not self.spec.kind.trains:
            return 0
        offsets = self.spec.offsets
        bounds = [offsets.bounds(slot) for slot in offsets.slots]
        elements = (sum(cuts[rank + 1] - cuts[rank] for cuts in bounds) for rank in range(offsets.shards))
        return state.tensors * max(elements) * self.spec.kind.master.itemsize

    @property
    def converted(self) -> int:
        """Bytes of the whole gradient's copy in the reduction dtype; 0 where the gradient has that dtype."""
        kind = self.spec.kind
        converts = kind.trains and kind.reduce != kind.gradient
        return self.spec.offsets.size * kind.reduce.itemsize if converts else 0

    @property
    def scattering(self) -> int:
        """Bytes that the gradient's reduce-scatter allocates temporarily."""
        spec = self.spec
        if not spec.kind.trains or spec.scatters_in_place:
            return 0
        if spec.offsets.shards == 1:
            return self.converted
        sent = spec.offsets.size * spec.kind.reduce.itemsize
        received = sent // spec.offsets.shards
        if self.device.type != "cpu":
            return received + self.converted
        if sent <= STAGING_LIMIT:  # the ranks of a host read it in staging buffers
            return received
        return received + self.converted + sent

    @property
    def reducing(self) -> int:
        """Bytes of the gradient's copy that is all-reduced; 0 where it is all-reduced in place."""
        summed, dtype = self.spec.summed, self.spec.kind.reduce
        if summed is None or self.replicas == 1:
            return 0
        moves = summed.offloaded and self.device.type != "cpu"
        return summed.elements * dtype.itemsize if moves or summed.dtype != dtype else 0

    @property
    def casting(self) -> int:
        """Bytes that the cast of a rank's part to float8 allocates temporarily, of one matrix at a time."""
        kind, offsets = self.spec.kind, self.spec.offsets
        if not kind.scaled:
            return 0
        bounds = map(offsets.bounds, offsets.slots)
        part = max(stop - start for cuts in bounds for start, stop in pairwise(cuts))
        moved = kind.master.itemsize if kind.offloads_parameters and self.device.type != "cpu" else 0
        rounded = kind.compute.itemsize if kind.compute != kind.master else 0
        single = FLOAT32.itemsize
        return part * (moved + rounded + single + (single if kind.compute != FLOAT32 else FLOAT8.itemsize))

    def allocated(self, state: OptimizerState) -> Iterator[MemoryBlock]:
        """Yield the memory blocks that stay allocated, with those of the optimizer's `state`."""
        spec = self.spec
        yield self._kept(spec.whole, Category.PARAMETERS)
        yield self._kept(spec.scales, Category.PARAMETERS, 3)  # factors, scales, largest values
        yield self._kept(spec.shard, Category.PARAMETERS)
        yield self._kept(spec.gradient, Category.GRADIENTS, self.stages)
        yield self._kept(spec.shard_gradient, Category.GRADIENTS)
        offloaded = spec.kind.offloads_gradients and self.device.type != "cpu"
        yield MemoryBlock(self.state_bytes(state), Category.STATE, offloaded)

    def _kept(self, flat: FlatSpec | None, category: Category, count: int = 1) -> MemoryBlock:
        """Return a block for `count` tensors of `flat`: 0 bytes unless kept; on the host if offloaded."""
        if flat is None or flat.freed:
            return MemoryBlock(0, category)
        return MemoryBlock(count * flat.nbytes, category, flat.offloaded and self.device.type != "cpu")


def rank_buffers(
    blueprint: Blueprint, stages: Collection[int], device: torch.device
) -> dict[str, list[RankBuffer]]:
    """Return by unit (parameters gathered together) the flat buffers of a rank that runs `stages`."""
    buffers = {}
    for unit, specs in blueprint.buffer_specs.items():
        users = len(blueprint.stages_with(unit, stages)) if specs else 0
        if users:
            ranks = len(blueprint.owners[specs[0].names[0]])
            buffers[unit] = [
                RankBuffer(spec, device, users, ranks * replicas_of(spec.kind, blueprint.plan))
                for spec in specs
            ]
    return buffers


class ParameterAccount:
    """Records in a memory ledger what a rank allocates to gather parameters and reduce gradients."""

    def __init__(
        self, ledger: MemoryLedger, units: Mapping[str, Sequence[RankBuffer]], state: OptimizerState
    ) -> None:
        """Record the memory that stays allocated, with that of the optimizer's `state`."""
        self._ledger = ledger
        self._units = units
        for name, buffers in units.items():
            ledger.hold(("always", name), (block for one in buffers for block in one.allocated(state)))

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Return by type of instruction (gather, reduce, …) the function that records it in the ledger."""
        return {
            GatherParameters: lambda i: self._gather(i.unit),
            ReleaseParameters: lambda i: self._ledger.drop(("gathered", i.unit)),
            AllocateGradient: lambda i: self._open(i.unit),
            ScatterGradient: lambda i: self._scatter(i.unit),
            AwaitScatter: lambda i: self._collect(i.unit),
            ReduceGradient: lambda i: self._reduce(i.unit),
            Finish: lambda i: self._finish(),
        }

    def begin(self) -> None:
        """Begin a step: record that the device copies of offloaded parameters are freed."""
        for name in self._units:
            self._ledger.drop(("device copies", name))

    def _gather(self, name: str) -> None:
        freed = [one.spec.whole.nbytes for one in self._units[name] if one.spec.whole.freed]
        self._hold("gathered", name, freed, Category.GATHERED)
        self._ledger.record_temporary(max(one.casting for one in self._units[name]))

    def _open(self, name: str) -> None:
        pairs = [(one.stages, one.spec.gradient) for one in self._units[name]]
        sizes = (count * flat.nbytes for count, flat in pairs if flat is not None and flat.freed)
        self._hold("opened", name, sizes)

    def _scatter(self, name: str) -> None:
        self._ledger.record_temporary(sum(one.converted for one in self._units[name]))
        self._hold("scattering", name, (one.scattering for one in self._units[name]))

    def _collect(self, name: str) -> None:
        self._ledger.drop(("scattering", name))
        self._ledger.drop(("opened", name))

    def _reduce(self, name: str) -> None:
        self._hold("reducing", name, (one.reducing for one in self._units[name]))

    def _finish(self) -> None:
        for name, buffers in self._units.items():
            self._ledger.drop(("reducing", name))
            copies = [one.spec.device_copy for one in buffers]
            sizes = (copy.nbytes for copy in copies if copy is not None)
            self._hold("device copies", name, sizes, Category.PARAMETERS)

    def _hold(
        self, what: str, name: str, sizes: Iterable[int], category: Category = Category.GRADIENTS
    ) -> None:
        self._ledger.hold((what, name), [MemoryBlock(size, category) for size in sizes])
