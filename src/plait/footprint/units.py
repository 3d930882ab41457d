"""The memory of parameters, gradients and the optimizer's state, as instructions about units change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plait.comm.arithmetic import SHOW_LIMIT
from plait.footprint.ledger import Block, Category, Ledger
from plait.schedules.program import (
    AwaitScatter,
    Finish,
    GatherParameters,
    OpenGradient,
    ReduceGradient,
    ReleaseParameters,
    ScatterGradient,
)
from plait.sharding.arranging import Kind
from plait.sharding.policy import Policy
from plait.sharding.slots import Slots


@dataclass(frozen=True)
class BufferSizes:
    """Which tensors there are for one flat buffer, in bytes; see `plait.sharding.unit.Maker`."""

    kind: Kind
    slots: Slots
    policy: Policy

    @property
    def keeps_whole(self) -> bool:
        """Whether parameters stay whole."""
        return not self.kind.cut or self.policy.keeps_parameters

    @property
    def keeps_gradient(self) -> bool:
        """Whether gradients stay whole."""
        return not self.kind.cut or self.policy.keeps_gradients

    @property
    def whole(self) -> int:
        """What layers use."""
        return self.slots.size * self.kind.dtype.itemsize

    @property
    def piece(self) -> int:
        """What the optimizer updates, where that is not a part of what layers use."""
        within = self.keeps_whole and self.kind.master == self.kind.dtype
        if not self._has_pieces or (within and not self.policy.offloads_parameters):
            return 0
        return self.slots.piece * self.kind.master.itemsize

    @property
    def visitor(self) -> int:
        """An offloaded piece between steps, where the optimizer runs on the device."""
        return self.piece if self.policy.offloads_parameters and not self.policy.offloads_gradients else 0

    @property
    def gradient(self) -> int:
        """What layers add to."""
        return self.slots.size * self.kind.gradient.itemsize if self.kind.trains else 0

    @property
    def reduces_in_place(self) -> bool:
        """Whether the gradient of the piece is a part of the whole one."""
        alike = self.keeps_gradient and self.kind.gradient == self.kind.master
        return not self._has_pieces or (alike and not self.policy.offloads_gradients)

    @property
    def piece_gradient(self) -> int:
        """What the optimizer reads, where that is not a part of what layers add to."""
        if not self.kind.trains or self.reduces_in_place:
            return 0
        return self.slots.piece * self.kind.master.itemsize

    @property
    def elements(self) -> int:
        """What the optimizer has a state for, on the rank that has the most."""
        if not self.kind.trains:
            return 0
        bounds = [self.slots.bounds(slot) for slot in self.slots.places]
        return max(sum(b[rank + 1] - b[rank] for b in bounds) for rank in range(self.slots.pieces))

    @property
    def scattering(self) -> int:
        """What is there besides while the gradient is summed over `shard`."""
        travels = self.slots.size * self.kind.reduce.itemsize
        converts = self.kind.reduce != self.kind.gradient
        if self.slots.pieces == 1:
            return travels if converts else 0
        landing = 0 if self.reduces_in_place and not converts else travels // self.slots.pieces
        if self.policy.device.type != "cpu":
            return landing + (travels if converts else 0)
        shown = travels <= SHOW_LIMIT or (self.reduces_in_place and not converts)
        return landing + (0 if shown else travels * (1 + converts))

    @property
    def reducing(self) -> int:
        """What is there besides while it is summed over those that hold the same: a copy, if it travels as one."""
        elements = self.slots.piece if self.kind.cut else self.slots.size
        source = self.kind.master if self.kind.cut else self.kind.gradient
        moves = self.kind.cut and self.policy.offloads_gradients and self.policy.device.type != "cpu"
        return elements * self.kind.reduce.itemsize if moves or source != self.kind.reduce else 0

    @property
    def _has_pieces(self) -> bool:
        return self.kind.cut or self.kind.master != self.kind.dtype


class UnitAccount:
    """Enters in a ledger what `Gatherer` and `Reducer` do with the units of one rank."""

    def __init__(
        self, ledger: Ledger, units: Mapping[str, Mapping[Kind, Slots]], policy: Policy, moments: int
    ) -> None:
        """What is always there is held from now on. `moments`: tensors of state a parameter."""
        self._ledger = ledger
        self._policy = policy
        self.units = {
            name: [BufferSizes(kind, slots, policy) for kind, slots in kinds.items()]
            for name, kinds in units.items()
        }
        for name, buffers in self.units.items():
            for number, sizes in enumerate(buffers):
                ledger.hold((name, number), self._always(sizes, moments))

    def _always(self, sizes: BufferSizes, moments: int) -> list[Block]:
        policy, state = self._policy, moments * sizes.elements * sizes.kind.master.itemsize
        return [
            Block(sizes.whole * sizes.keeps_whole, Category.PARAMETERS),
            Block(sizes.piece, Category.PARAMETERS, policy.offloads_parameters),
            Block(sizes.gradient * sizes.keeps_gradient, Category.GRADIENTS),
            Block(sizes.piece_gradient, Category.GRADIENTS, policy.offloads_gradients),
            Block(state, Category.STATE, policy.offloads_gradients),
        ]

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What each instruction about units changes."""
        return {
            GatherParameters: lambda i: self._hold(Category.GATHERED, i.unit, self._gathered),
            ReleaseParameters: lambda i: self._ledger.drop((Category.GATHERED, i.unit)),
            OpenGradient: lambda i: self._hold(Category.GRADIENTS, i.unit, self._opened),
            ScatterGradient: lambda i: self._scatter(i.unit),
            AwaitScatter: lambda i: self._collect(i.unit),
            ReduceGradient: lambda i: self._hold("reducing", i.unit, lambda sizes: sizes.reducing),
            Finish: lambda i: self._finish(),
        }

    def begin(self) -> None:
        """A step begins: offloaded pieces leave the device."""
        for name in self.units:
            self._ledger.drop(("visitors", name))

    def _scatter(self, name: str) -> None:
        converted = sum(
            sizes.slots.size * sizes.kind.reduce.itemsize
            for sizes in self.units[name]
            if sizes.kind.trains and sizes.kind.reduce != sizes.kind.gradient
        )
        self._ledger.reach(converted)
        self._hold("scattering", name, lambda sizes: sizes.scattering)

    def _collect(self, name: str) -> None:
        self._ledger.drop(("scattering", name))
        self._ledger.drop((Category.GRADIENTS, name))

    def _finish(self) -> None:
        for name in self.units:
            self._ledger.drop(("reducing", name))
            visitors = (sizes.visitor for sizes in self.units[name])
            self._ledger.hold(
                ("visitors", name), [Block(nbytes, Category.PARAMETERS) for nbytes in visitors]
            )

    def _hold(self, what: str, name: str, size: Callable[[BufferSizes], int]) -> None:
        category = Category.GATHERED if what == Category.GATHERED else Category.GRADIENTS
        blocks = [Block(size(sizes), category) for sizes in self.units[name]]
        self._ledger.hold((what, name), blocks)

    @staticmethod
    def _gathered(sizes: BufferSizes) -> int:
        return 0 if sizes.keeps_whole else sizes.whole

    @staticmethod
    def _opened(sizes: BufferSizes) -> int:
        return 0 if sizes.keeps_gradient else sizes.gradient
