"""Sizes, dtypes and offsets of the flat buffers of a model's parameters, from shapes and units alone.

Ranks allocate their buffers from these specs (`plait.engine.sharding.unit`), and the memory prediction counts
the same specs (`plait.estimate.memory.parameters`). Every rank decides them for all units, so that it knows
which piece of which parameter any other rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch

from plait.errors import PlanError
from plait.plan.layout.layout import Flat, Layout, Placement, Replicate
from plait.plan.offsets import Offsets, compute_offsets
from plait.plan.parameter_units import BufferKind, Dtype, UnitSpec


@dataclass(frozen=True)
class FlatSpec:
    """Size, dtype and device of one flat tensor of a buffer."""

    elements: int
    dtype: Dtype
    kept: bool = True
    """Whether it stays allocated between uses."""
    offloaded: bool = False
    """Whether it is on the CPU, wherever layers run."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor while it is allocated."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class BufferSpec:
    """Specification of one flat buffer: offsets of its parameters; size, dtype and device of its tensors."""

    kind: BufferKind
    offsets: Offsets

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the buffer's parameters."""
        return tuple(slot.name for slot in self.offsets.slots)

    @cached_property
    def whole(self) -> FlatSpec:
        """Spec of the flat tensor of the whole (gathered) parameters, which layers use."""
        kept = not self.kind.sharded or self.kind.keeps_parameters
        return FlatSpec(self.offsets.size, self.kind.compute, kept)

    @cached_property
    def has_pieces(self) -> bool:
        """Whether the optimizer's parameters are not the layers' own, but shards, copies or views of them."""
        kind = self.kind
        return kind.sharded or kind.master != kind.compute or (kind.trains and kind.gradient != kind.master)

    @cached_property
    def piece(self) -> FlatSpec | None:
        """Spec of the flat tensor that the optimizer updates; None where that is `whole` or a view of it."""
        offloaded = self.kind.offloads_parameters
        is_view = self.whole.kept and self.kind.master == self.kind.compute and not offloaded
        if is_view or not self.has_pieces:
            return None
        return FlatSpec(self.offsets.piece, self.kind.master, offloaded=offloaded)

    @cached_property
    def device_copy(self) -> FlatSpec | None:
        """Spec of the optimizer's GPU copy of offloaded pieces; None unless only parameters are offloaded."""
        if self.piece is None or not self.kind.trains or not self.kind.offloads_parameters:
            return None
        return None if self.kind.offloads_gradients else FlatSpec(self.offsets.piece, self.kind.master)

    @cached_property
    def gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that backwards add to, one per stage of a rank; None if frozen."""
        if not self.kind.trains:
            return None
        kept = not self.kind.sharded or self.kind.keeps_gradients
        return FlatSpec(self.offsets.size, self.kind.gradient, kept)

    @cached_property
    def piece_gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that the optimizer reads; None where it is `gradient` or a view of it."""
        if self.gradient is None or not self.has_pieces:
            return None
        offloaded = self.kind.offloads_gradients
        if self.gradient.kept and self.kind.gradient == self.kind.master and not offloaded:
            return None
        return FlatSpec(self.offsets.piece, self.kind.master, offloaded=offloaded)

    @cached_property
    def scatters_in_place(self) -> bool:
        """Whether the reduce-scatter of the gradient writes its result to a view of the gradient."""
        return self.piece_gradient is None and self.kind.reduce == self.kind.gradient

    @cached_property
    def summed(self) -> FlatSpec | None:
        """Spec of the gradient that replicas all-reduce: the shard's, if sharded; None if frozen."""
        if self.gradient is None or not self.kind.sharded:
            return self.gradient
        return self.piece_gradient or FlatSpec(self.offsets.piece, self.kind.gradient)


BufferSpecs: TypeAlias = Mapping[str, tuple[BufferSpec, ...]]
"""The buffers of each unit, by its name."""


def build_buffer_specs(units: Mapping[str, UnitSpec], layouts: Mapping[str, Layout]) -> BufferSpecs:
    """Return by unit (parameters gathered together) the specs of its flat buffers, one per `BufferKind`.

    `layouts` are over `tp`. Offsets are those of the first rank along `tp`, which has the largest pieces; so
    they are equal on all. Raises PlanError where layers and their shards would cut a parameter over one axis.
    """
    specs = {}
    for name, unit in units.items():
        shapes: dict[BufferKind, dict[str, torch.Size]] = {}
        for member, kind in unit.kinds.items():
            layout = layouts[member]
            _refuse_cut_twice(member, layout, kind)
            largest = layout.local_shape([0] * len(layout.axes))
            shapes.setdefault(kind, {})[member] = torch.Size(largest)
        specs[name] = tuple(
            BufferSpec(kind, compute_offsets(members, _ranks(kind, layouts[next(iter(members))])))
            for kind, members in shapes.items()
        )
    return specs


def piece_layouts(specs: BufferSpecs, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of the shards that optimizers update: over `tp`, and over the axes of their kind."""
    pieces = dict(layouts)
    for spec in (spec for buffers in specs.values() for spec in buffers if spec.kind.sharded):
        for slot in spec.offsets.slots:
            layout = layouts[slot.name]
            bounds, inner = spec.offsets.bounds(slot), spec.offsets.pieces
            flat: dict[str, Placement] = {}
            for axis in (axis for axis in layout.axes if axis in spec.kind.sharded_over):
                degree = layout.axis_degrees[axis]
                inner //= degree
                if degree > 1 or not flat:
                    flat[axis] = Flat(bounds[::inner])
            pieces[slot.name] = Layout(layout.shape, layout.axis_degrees, layout.axis_placements | flat)
    return pieces


def _ranks(kind: BufferKind, layout: Layout) -> int:
    """Return the number of ranks between which a buffer is cut."""
    return prod(degree for axis, degree in layout.axis_degrees.items() if axis in kind.sharded_over)


def _refuse_cut_twice(name: str, layout: Layout, kind: BufferKind) -> None:
    for axis in kind.sharded_over:
        placement = layout.axis_placements.get(axis, Replicate())
        if not isinstance(placement, Replicate):
            raise PlanError(
                f"{name} is cut over {axis} as {placement} by the rules of its layer, and its unit would be "
                f"sharded over {axis} too: give the unit other axes, or the layer another rule."
            )
