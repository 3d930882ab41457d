"""The memory of parameters, gradients and the optimizer's state, as instructions about units change it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.blueprint import Blueprint
from plait.comm.transport.shared_memory.transport import STAGING_LIMIT
from plait.footprint.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.schedules.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    GatherParameters,
    ReduceGradient,
    ReleaseParameters,
    ScatterGradient,
)
from plait.sharding.buffer_specs import BufferKind
from plait.sharding.offsets import Offsets
from plait.sharding.storage_policy import StoragePolicy


@dataclass(frozen=True)
class BufferSizes:
    """The bytes of each tensor of one flat buffer, 0 where there is none."""

    kind: BufferKind
    slots: Offsets
    policy: StoragePolicy
    stages: int
    """Of the rank, that use it: each adds to a gradient of its own."""
    sums: bool
    """Whether gradients are summed besides, over ranks that hold the same parameters, or pieces."""

    @property
    def whole(self) -> int:
        """What layers use."""
        return self.slots.size * self.kind.dtype.itemsize

    @property
    def keeps_whole(self) -> bool:
        """Whether that stays between uses."""
        return not self.kind.cut or self.policy.keeps_parameters

    @property
    def piece(self) -> int:
        """What the optimizer updates, where that is not a part of what layers use."""
        within = self.keeps_whole and self.kind.master == self.kind.dtype
        if not self._has_pieces or (within and not self.policy.offloads_parameters):
            return 0
        return self.slots.piece * self.kind.master.itemsize

    @property
    def visitor(self) -> int:
        """An offloaded piece that is on the device between steps, for the optimizer."""
        policy = self.policy
        comes = self.kind.trains and policy.offloads_parameters and not policy.offloads_gradients
        return self.piece if comes else 0

    @property
    def gradient(self) -> int:
        """What layers add to, all stages together."""
        return self.stages * self.slots.size * self.kind.gradient.itemsize if self.kind.trains else 0

    @property
    def keeps_gradient(self) -> bool:
        """Whether that stays between uses."""
        return not self.kind.cut or self.policy.keeps_gradients

    @property
    def piece_gradient(self) -> int:
        """What the optimizer reads, where that is not a part of what layers add to."""
        if not self.kind.trains or not self._has_pieces or self._reduces_in_place:
            return 0
        return self.slots.piece * self.kind.master.itemsize

    @property
    def moment(self) -> int:
        """One tensor of the optimizer's state for each piece, on the rank along `shard` that has the most."""
        if not self.kind.trains:
            return 0
        bounds = [self.slots.bounds(slot) for slot in self.slots.places]
        elements = (sum(cuts[rank + 1] - cuts[rank] for cuts in bounds) for rank in range(self.slots.pieces))
        return max(elements) * self.kind.master.itemsize

    @property
    def converted(self) -> int:
        """The whole gradient in the dtype in which it travels, where that is another."""
        converts = self.kind.trains and self.kind.reduce != self.kind.gradient
        return self.slots.size * self.kind.reduce.itemsize if converts else 0

    @property
    def scattering(self) -> int:
        """What is there besides while the gradient is summed over `shard`."""
        if not self.kind.trains or (self._reduces_in_place and not self.converted):
            return 0
        if self.slots.pieces == 1:
            return self.converted
        travels = self.slots.size * self.kind.reduce.itemsize
        landing = travels // self.slots.pieces
        if self.policy.device.type != "cpu":
            return landing + self.converted
        if travels <= STAGING_LIMIT:  # the ranks of a host have shown each other what travels
            return landing
        return landing + self.converted + travels

    @property
    def reducing(self) -> int:
        """What is there besides while it is summed over those that hold the same: a copy, or nothing."""
        if not self.kind.trains or not self.sums:
            return 0
        elements, dtype = self.slots.size, self.kind.gradient
        if self.kind.cut:
            elements, dtype = self.slots.piece, self.kind.master
        leaves = self.kind.cut and self.policy.gradient_home != self.policy.device
        return elements * self.kind.reduce.itemsize if leaves or dtype != self.kind.reduce else 0

    @property
    def _has_pieces(self) -> bool:
        kind = self.kind
        return kind.cut or kind.master != kind.dtype or (kind.trains and kind.gradient != kind.master)

    @property
    def _reduces_in_place(self) -> bool:
        alike = self.keeps_gradient and self.kind.gradient == self.kind.master
        return alike and not self.policy.offloads_gradients


def buffers_of(
    blueprint: Blueprint, stages: Collection[int], device: torch.device
) -> dict[str, list[BufferSizes]]:
    """Of each unit that these stages use, on a rank that has them and computes on `device`."""
    sequence, policy = blueprint.sequence, blueprint.policy_on(device)
    alike = blueprint.plan.replicate if blueprint.plan.shards else blueprint.plan.dp
    buffers: dict[str, list[BufferSizes]] = {}
    for name in sequence.users:
        unit = sequence.unit_of(name)
        users = len(blueprint.stages_with(unit, stages))
        if unit not in buffers and users:
            tied = len(blueprint.owners[name]) > 1
            buffers[unit] = [
                BufferSizes(kind, slots, policy, users, sums=alike > 1 or tied or kind.summands > 1)
                for kind, slots in blueprint.arrangement[unit].items()
            ]
    return buffers


class ParameterAccount:
    """Enters in a ledger what `Gatherer` and `Reducer` do with the units of one rank."""

    def __init__(
        self, ledger: MemoryLedger, units: Mapping[str, Sequence[BufferSizes]], moments: int
    ) -> None:
        """What is always there is held from now on. `moments`: tensors of state a parameter."""
        self._ledger = ledger
        self._units = units
        for name, buffers in units.items():
            always = (block for sizes in buffers for block in _always(sizes, moments))
            ledger.hold(("always", name), always)

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What each instruction about units changes."""
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
        """A step begins: what the optimizer has updated leaves the device, where it is offloaded."""
        for name in self._units:
            self._ledger.drop(("visiting", name))

    def _gather(self, name: str) -> None:
        sizes = (0 if one.keeps_whole else one.whole for one in self._units[name])
        self._ledger.hold(("gathered", name), [MemoryBlock(size, Category.GATHERED) for size in sizes])

    def _open(self, name: str) -> None:
        sizes = (0 if one.keeps_gradient else one.gradient for one in self._units[name])
        self._ledger.hold(("opened", name), _gradients(sizes))

    def _scatter(self, name: str) -> None:
        self._ledger.reach(sum(one.converted for one in self._units[name]))
        self._ledger.hold(("scattering", name), _gradients(one.scattering for one in self._units[name]))

    def _collect(self, name: str) -> None:
        self._ledger.drop(("scattering", name))
        self._ledger.drop(("opened", name))

    def _reduce(self, name: str) -> None:
        self._ledger.hold(("reducing", name), _gradients(one.reducing for one in self._units[name]))

    def _finish(self) -> None:
        for name, sizes in self._units.items():
            self._ledger.drop(("reducing", name))
            visitors = [MemoryBlock(one.visitor, Category.PARAMETERS) for one in sizes]
            self._ledger.hold(("visiting", name), visitors)


def _always(sizes: BufferSizes, moments: int) -> Iterator[MemoryBlock]:
    """What a buffer has all the time. Where layers run on the CPU, what is offloaded is beside the rest."""
    policy = sizes.policy
    elsewhere = policy.device.type != "cpu"
    parameters_leave = elsewhere and policy.offloads_parameters
    gradients_leave = elsewhere and policy.offloads_gradients
    yield MemoryBlock(sizes.whole * sizes.keeps_whole, Category.PARAMETERS)
    yield MemoryBlock(sizes.piece, Category.PARAMETERS, parameters_leave)
    yield MemoryBlock(sizes.gradient * sizes.keeps_gradient, Category.GRADIENTS)
    yield MemoryBlock(sizes.piece_gradient, Category.GRADIENTS, gradients_leave)
    yield MemoryBlock(moments * sizes.moment, Category.STATE, gradients_leave)


def _gradients(sizes: Iterable[int]) -> list[MemoryBlock]:
    return [MemoryBlock(size, Category.GRADIENTS) for size in sizes]
