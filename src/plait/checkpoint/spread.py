"""How a run spreads a model over its ranks, as plain data: who would write what into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

from plait.checkpoint.contents import (
    Writers,
    keys_of_states,
    optimizer_state,
    parameter,
    ranks_with,
    whole_like,
)
from plait.checkpoint.manifest import Global
from plait.checkpoint.optimizer import is_number
from plait.checkpoint.tensor_file import Item
from plait.checkpoint.wholes import Wholes
from plait.comm.coordinates import sizes_of
from plait.layout import Layout
from plait.layout.boxes import parts
from plait.plan import Plan

Spreading = Iterator[tuple[str, Layout, tuple[int, ...]]]
"""A tensor's name in a checkpoint, how it is cut, and the ranks of `pp` that hold pieces of it."""


@dataclass(frozen=True)
class Spread:
    """How a model lies over the ranks of a plan."""

    plan: Plan
    layouts: Mapping[str, Layout]
    """Of every parameter, in the order in which ranks go through them."""
    buffer_shapes: Mapping[str, tuple[int, ...]]
    """Of the buffers that are saved."""
    aliases: Mapping[str, str]
    """For each further name of a parameter, its first."""
    holders: Mapping[str, tuple[int, ...]]
    """The ranks of `pp` that hold each parameter and buffer."""

    def items(self, wholes: Wholes) -> list[list[Item]]:
        """For each rank, what it would write of the tensors in a checkpoint."""
        sizes = sizes_of(pp=self.plan.pp, dp=self.plan.dp, tp=self.plan.tp, replicate=self.plan.replicate)
        found: list[list[Item]] = [[] for _ in range(self.plan.world)]
        writers = Writers()
        for name, layout, stages in self._tensors(wholes.manifest.tensors):
            dtype = wholes.dtype(name)
            for coordinate in layout.coordinates():
                if coordinate != layout.owner(coordinate):
                    continue  # a piece that was there already
                where = dict(zip(layout.axes, coordinate, strict=True))
                boxes = [part.box for part in parts(layout, where)]
                size = sum(prod(box.sizes) for box in boxes) * dtype.itemsize
                writer = writers.of(ranks_with(layout, where, stages, sizes), size)
                found[writer] += (
                    Item(name, box, dtype, partial(wholes.read_box, name, box)) for box in boxes
                )
        return found

    def _tensors(self, there: Mapping[str, Global]) -> Spreading:
        """All that are `there`, in the order in which a rank meets them."""
        states = keys_of_states(there)
        for name, layout in self.layouts.items():
            yield parameter(name), layout, self.holders[name]
            for key in states.get(name, ()):
                full = optimizer_state(name, key)
                shape = there[full].shape
                alike = shape == layout.shape and not is_number(key, shape, layout.shape)
                yield full, layout if alike else whole_like(layout, shape), self.holders[name]
        some = next(iter(self.layouts.values()))
        for name, shape in self.buffer_shapes.items():
            yield parameter(name), whole_like(some, shape), self.holders[name]
        for name in map(parameter, self.aliases):
            if name in there:  # torch writes what is tied under each of its names
                yield name, whole_like(some, there[name].shape), (0,)
