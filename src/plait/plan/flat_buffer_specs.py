"""Sizes, dtypes and offsets of the flat buffers of a model's parameters, and the cuts between ranks.

Ranks allocate their buffers from these specs (`plait.engine.sharding.unit`), and the memory prediction counts
the same specs (`plait.estimate.memory.parameters`). Every rank decides them for all units, so that it knows
which shard of which parameter any other rank holds.

    | query.weight            | up.weight        …  | query.bias |pad| … |
    |        rank 0       |       rank 1       |        rank 2         |

All shards have the same size, so that a collective moves them without a copy. A shard that ends between two
rows can be described by any checkpoint format: so parameters start at multiples of their rows, and shards are
multiples of every row, as long as the padding is small. Where it is not (tiny layers, many ranks) cuts fall
on multiples of `ALIGNMENT` elements.

Matrices come before vectors, each in the order of the model: so the weights of query, key and value follow
each other, and so do their biases (`plait.tensor.autograd.joined_linears`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import TypeAlias

import torch

from plait.errors import PlanError
from plait.plan.axes import DATA_AXES, EXPERT_DATA_AXES
from plait.plan.layout.layout import Flat, Layout, Placement, Replicate
from plait.plan.parameter_units import FLOAT32, BufferKind, Dtype, UnitSpec

ALIGNMENT = 16
"""Elements. Fused optimizers give bit-equal results wherever a buffer is cut at multiples of 8."""
MOST_PADDING = 0.005
"""The largest share of a buffer's elements that is padded for cuts between rows."""


@dataclass(frozen=True)
class Slot:
    """The range of a parameter's elements in a flat buffer: `start … start + numel`."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Index after the parameter's last element in the flat tensor."""
        return self.start + self.shape.numel()

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's elements of `flat`, in its shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Offsets:
    """The position of each parameter in a flat buffer of `size` elements, cut into `shards` equal shards."""

    slots: tuple[Slot, ...]
    size: int
    shards: int

    @property
    def shard_size(self) -> int:
        """Number of elements of one rank's shard."""
        return self.size // self.shards

    def bounds(self, slot: Slot) -> tuple[int, ...]:
        """Return the bounds at which shards cut a parameter: rank `i` has `bounds[i] … bounds[i + 1]`."""
        cuts = (number * self.shard_size - slot.start for number in range(1, self.shards))
        within = (min(max(cut, 0), slot.shape.numel()) for cut in cuts)
        return (0, *within, slot.shape.numel())


def compute_offsets(shapes: Mapping[str, torch.Size], shards: int) -> Offsets:
    """Return the offsets of parameters of these `shapes` in a flat buffer of `shards` equal shards."""
    if shards > 1:
        elements = sum(shape.numel() for shape in shapes.values())
        by_rows = _offsets_by_rows(shapes, shards)
        if by_rows.size - elements <= MOST_PADDING * elements:
            return by_rows
    starts, stop = {}, 0
    for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
        starts[name] = _round_up(stop, ALIGNMENT)
        stop = starts[name] + shape.numel()
    starts = {name: starts[name] for name in shapes}
    return _offsets(shapes, starts, shards * _round_up(-(-stop // shards), ALIGNMENT), shards)


def _offsets_by_rows(shapes: Mapping[str, torch.Size], shards: int) -> Offsets:
    """Return offsets at multiples of each parameter's row length, so that cuts fall between rows.

    Parameters with longer rows come first. No padding is needed where long rows are multiples of shorter
    ones.
    """
    rows = {name: max(1, prod(shape[1:])) for name, shape in shapes.items()}
    starts, stop = {}, 0
    for name in sorted(shapes, key=lambda name: -rows[name]):
        starts[name] = _round_up(stop, lcm(rows[name], ALIGNMENT))
        stop = starts[name] + shapes[name].numel()
    shard_size = _round_up(-(-stop // shards), lcm(ALIGNMENT, *rows.values()))
    return _offsets(shapes, starts, shards * shard_size, shards)


def _offsets(shapes: Mapping[str, torch.Size], starts: Mapping[str, int], size: int, shards: int) -> Offsets:
    return Offsets(tuple(Slot(name, shapes[name], start) for name, start in starts.items()), size, shards)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class FlatSpec:
    """Size, dtype and device of one of a buffer's flat tensors, such as the whole parameters or a shard."""

    elements: int
    dtype: Dtype
    kept: bool = True
    """Whether it holds its values between uses."""
    offloaded: bool = False
    """Whether it is on the CPU, wherever layers run."""
    static: bool = False
    """Whether its memory stays allocated where it is, also if it is not kept."""

    @property
    def freed(self) -> bool:
        """Whether the flat tensor's memory is freed between uses."""
        return not (self.kept or self.static)

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
        return FlatSpec(self.offsets.size, self.kind.gather, kept, static=self.kind.static)

    @property
    def scales(self) -> FlatSpec | None:
        """Spec of the scales of matrices in float8, one for each; None for other parameters."""
        return FlatSpec(len(self.offsets.slots), FLOAT32) if self.kind.scaled else None

    @cached_property
    def has_own_parameters(self) -> bool:
        """Whether the optimizer's parameters are not the layers' own, but shards, copies or views of them."""
        kind = self.kind
        return kind.sharded or kind.has_master or (kind.trains and kind.gradient != kind.master)

    @cached_property
    def shard(self) -> FlatSpec | None:
        """Spec of the flat tensor that the optimizer updates; None where that is `whole` or a view of it."""
        offloaded = self.kind.offloads_parameters
        is_view = self.whole.kept and not self.kind.has_master and not offloaded
        if is_view or not self.has_own_parameters:
            return None
        return FlatSpec(self.offsets.shard_size, self.kind.master, offloaded=offloaded)

    @cached_property
    def device_copy(self) -> FlatSpec | None:
        """Spec of the optimizer's GPU copy of offloaded shards; None unless only parameters are offloaded."""
        if self.shard is None or not self.kind.trains or not self.kind.offloads_parameters:
            return None
        return None if self.kind.offloads_gradients else FlatSpec(self.offsets.shard_size, self.kind.master)

    @cached_property
    def gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that backwards add to, one per stage of a rank; None if frozen."""
        if not self.kind.trains:
            return None
        kept = not self.kind.sharded or self.kind.keeps_gradients
        return FlatSpec(self.offsets.size, self.kind.gradient, kept, static=self.kind.static)

    @cached_property
    def shard_gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that the optimizer reads; None where it is `gradient` or a view of it."""
        if self.gradient is None or not self.has_own_parameters:
            return None
        offloaded = self.kind.offloads_gradients
        if self.gradient.kept and self.kind.gradient == self.kind.master and not offloaded:
            return None
        return FlatSpec(self.offsets.shard_size, self.kind.master, offloaded=offloaded)

    @cached_property
    def scatters_in_place(self) -> bool:
        """Whether the reduce-scatter of the gradient writes its result to a view of the gradient."""
        return self.shard_gradient is None and self.kind.reduce == self.kind.gradient

    @cached_property
    def summed(self) -> FlatSpec | None:
        """Spec of the gradient that replicas all-reduce: the shard's, if sharded; None if frozen."""
        if self.gradient is None or not self.kind.sharded:
            return self.gradient
        return self.shard_gradient or FlatSpec(self.offsets.shard_size, self.kind.gradient)


BufferSpecs: TypeAlias = Mapping[str, tuple[BufferSpec, ...]]
"""The buffers of each unit, by its name."""


def build_buffer_specs(units: Mapping[str, UnitSpec], layouts: Mapping[str, Layout]) -> BufferSpecs:
    """Return by unit (parameters gathered together) the specs of its flat buffers, one per `BufferKind`.

    `layouts` are over `tp`. Offsets are those of the first rank along `tp`, which has the largest shards; so
    they are equal on all. Raises PlanError where a unit cannot be sharded over its axes.
    """
    specs = {}
    for name, unit in units.items():
        shapes: dict[BufferKind, dict[str, torch.Size]] = {}
        for member, kind in unit.kinds.items():
            layout = layouts[member]
            _require_sharded_apart(member, layout, kind)
            largest = layout.local_shape([0] * len(layout.axes))
            shapes.setdefault(kind, {})[member] = torch.Size(largest)
        specs[name] = tuple(
            BufferSpec(kind, compute_offsets(members, _ranks(kind, layouts[next(iter(members))])))
            for kind, members in shapes.items()
        )
    return specs


def shard_layouts(specs: BufferSpecs, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of the parameter shards that optimizers update, over `tp` and the sharding axes."""
    shards = dict(layouts)
    for spec in (spec for buffers in specs.values() for spec in buffers if spec.kind.sharded):
        for slot in spec.offsets.slots:
            layout = layouts[slot.name]
            bounds, inner = spec.offsets.bounds(slot), spec.offsets.shards
            flat: dict[str, Placement] = {}
            for axis in (axis for axis in layout.axes if axis in spec.kind.sharded_over):
                degree = layout.axis_degrees[axis]
                inner //= degree
                if degree > 1 or not flat:
                    flat[axis] = Flat(bounds[::inner])
            shards[slot.name] = Layout(layout.shape, layout.axis_degrees, layout.axis_placements | flat)
    return shards


def _ranks(kind: BufferKind, layout: Layout) -> int:
    """Return the number of ranks between which a buffer is cut."""
    return prod(degree for axis, degree in layout.axis_degrees.items() if axis in kind.sharded_over)


def _require_sharded_apart(name: str, layout: Layout, kind: BufferKind) -> None:
    """Raise PlanError where a unit is sharded over an axis that cuts a parameter, or copies its gradient."""
    for axis in kind.sharded_over:
        placement = layout.axis_placements.get(axis, Replicate())
        if not isinstance(placement, Replicate):
            raise PlanError(
                f"{name} is cut over {axis} as {placement} by the rules of its layer, and its unit would be "
                f"sharded over {axis} too: give the unit other axes, or the layer another rule."
            )
        if (
            kind.trains
            and axis not in (*DATA_AXES, *EXPERT_DATA_AXES)
            and kind.summands != layout.axis_degrees[axis]
        ):
            raise PlanError(
                f"{name} has the same gradient on several ranks of {axis}, which a unit sharded over {axis} "
                "would add up: give the unit other axes, or set plan.sequence_parallel."
            )
