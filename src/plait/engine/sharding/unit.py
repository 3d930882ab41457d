"""Units: parameters that are gathered and reduced together, in flat buffers, over the ranks of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor, nn

from plait.engine.sharding.flat_buffer import FlatBuffer, StageView
from plait.engine.sharding.float8_matrices import ScaledMatrices
from plait.plan.axes import DATA_AXES, axes_of
from plait.plan.flat_buffer_specs import BufferSpec, FlatSpec, Slot
from plait.plan.layout.layout import Layout
from plait.plan.parameter_units import BufferKind
from plait.ranks.accelerator import host_zeros
from plait.ranks.collectives import shared_zeros
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh
from plait.tensor.dtypes import torch_dtype
from plait.tensor.float8.recipes import Recipe

Owners: TypeAlias = Mapping[str, tuple[int, ...]]
"""For each parameter the ranks of `pp` that hold it, in order; the first adds it to the gradient norm."""


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together: a layer's, or one that several layers share.

    Named after the layer or the parameter.
    """

    name: str
    buffers: tuple[FlatBuffer, ...]
    stages: tuple[int, ...]
    """The stages of this rank that use it, in order."""

    def parameters_of(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters of one stage's layers, by full name in the model."""
        views = self._views_of(stage)
        return {name: parameter for view in views for name, parameter in view.parameters.items()}

    def gradients_of(self, stage: int) -> dict[tuple[str, int], Tensor]:
        """Return the gradients that a stage's backward adds to, keyed by (full name in the model, stage)."""
        views = self._views_of(stage)
        return {(name, stage): gradient for view in views for name, gradient in view.gradients.items()}

    def _views_of(self, stage: int) -> list[StageView]:
        index = self.stages.index(stage)
        return [buffer.stage_views[index if buffer.spec.kind.trains else 0] for buffer in self.buffers]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The unit's parameters by full name, as this rank's first stage that uses the unit holds them."""
        return self.parameters_of(self.stages[0])

    @cached_property
    def shard_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by full name in the model."""
        return {name: shard for buffer in self.buffers for name, shard in buffer.shard_parameters.items()}

    def scales_of(self, stage: int) -> dict[int, Tensor]:
        """Return the scales of matrices that a stage's layers have in float8, by the id of the parameter."""
        views = zip(self.buffers, self._views_of(stage), strict=True)
        scaled = ((buffer.scaled, view) for buffer, view in views if buffer.scaled is not None)
        return {
            id(one): matrices.scale_of(name)
            for matrices, view in scaled
            for name, one in view.parameters.items()
        }

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients stay allocated between the layers that add to them."""
        gradients = (buffer.spec.gradient for buffer in self.trainable)
        return all(gradient is None or gradient.kept for gradient in gradients)

    @cached_property
    def trainable(self) -> tuple[FlatBuffer, ...]:
        """The buffers that have gradients."""
        return tuple(buffer for buffer in self.buffers if buffer.spec.kind.trains)


@dataclass(frozen=True)
class UnitFactory:
    """Builds the `Unit`s of one rank: allocates their flat buffers, and writes the initial values.

    All ranks of a group build the same units in the same order, as `shared_zeros` requires.
    """

    device: torch.device
    """The device where layers run."""
    layouts: Mapping[str, Layout]
    """The layouts of the shards that the optimizer updates."""
    coordinate: Mapping[str, int]
    shard_groups: Mapping[tuple[str, ...], Group]
    """By the axes over which a buffer is sharded, the ranks between which it is."""
    replica_groups: Mapping[str, Group]
    """By parameter, the ranks over which its gradient, or its shard's gradient, is all-reduced."""
    linears: Recipe | None
    """How linears in float8 cast their weights."""
    tp_group: Group
    """The ranks that have other parts of partitioned weights."""
    value_of: Callable[[str], Tensor]
    """Returns the initial value of a parameter as this rank's layers have it."""

    def build(self, name: str, specs: Sequence[BufferSpec], stages: tuple[int, ...]) -> Unit:
        """Return a unit with initial values, for the `stages` of this rank that use it, in order."""
        return Unit(name, tuple(self._buffer(self._local(spec), len(stages)) for spec in specs), stages)

    def _local(self, spec: BufferSpec) -> BufferSpec:
        """Return `spec` with the shapes of this rank's shards along `tp`."""
        slots = (
            replace(slot, shape=torch.Size(self.layouts[slot.name].sizes(self.coordinate)))
            for slot in spec.offsets.slots
        )
        return replace(spec, offsets=replace(spec.offsets, slots=tuple(slots)))

    def _buffer(self, spec: BufferSpec, stages: int) -> FlatBuffer:
        kind, offsets = spec.kind, spec.offsets
        shard_group = self.shard_groups[kind.sharded_over] if kind.sharded else None
        replica_group = self.replica_groups.get(spec.names[0]) if kind.trains else None
        whole = self._allocate(spec.whole)
        views = [_stage_view(spec, whole, self._gradient(spec, shard_group or replica_group))]
        if kind.trains:
            views += (_stage_view(spec, whole, self._gradient(spec, None)) for _ in range(1, stages))
        gradient = views[0].gradient
        first = 0 if shard_group is None else shard_group.index * offsets.shard_size
        own = slice(first, first + offsets.shard_size)
        slots = self._shard_slots(spec, first)
        shard, shard_parameters = whole, views[0].parameters
        shard_gradient, shard_gradients = gradient, views[0].gradients
        if spec.has_own_parameters:
            shard = whole[own] if spec.shard is None else self._allocate(spec.shard)
            shard_parameters = {
                name: _parameter(slot.view_of(shard), trains=kind.trains) for name, slot in slots.items()
            }
        if spec.has_own_parameters and gradient is not None:
            flat = spec.shard_gradient
            shard_gradient = gradient[own] if flat is None else self._allocate(flat)
            shard_gradients = {name: slot.view_of(shard_gradient) for name, slot in slots.items()}
        buffer = FlatBuffer(
            spec=spec,
            shard_group=shard_group,
            replica_group=replica_group,
            whole=whole,
            own=whole[own],
            shard=shard,
            shard_parameters=shard_parameters,
            shard_slots=slots,
            shard_gradient=shard_gradient,
            shard_gradients=shard_gradients,
            stage_views=tuple(views),
            scaled=self._scaled(spec, slots, shard_group) if kind.scaled else None,
        )
        self._fill(buffer)
        return buffer

    def _scaled(
        self, spec: BufferSpec, slots: Mapping[str, Slot], shard_group: Group | None
    ) -> ScaledMatrices:
        """Return the scales, not yet known, of a buffer of matrices in float8."""
        assert self.linears is not None
        groups = [one for one in (shard_group, self.tp_group) if one is not None and one.size > 1]
        factors = torch.ones(len(slots), device=self.device)
        # CUDA's products read a scale where an address is a multiple of 16.
        scales = torch.ones(len(slots), 4, device=self.device)[:, 0]
        return ScaledMatrices(
            self.linears.weight, torch_dtype(spec.kind.compute), tuple(groups), slots, factors, scales
        )

    def _gradient(self, spec: BufferSpec, group: Group | None) -> Tensor | None:
        """Return a flat gradient of zeros, None if frozen; where possible in memory that `group` shares."""
        if spec.gradient is None or group is None or not spec.gradient.kept:
            return None if spec.gradient is None else self._allocate(spec.gradient)
        return shared_zeros(spec.gradient.elements, torch_dtype(spec.gradient.dtype), self.device, group)

    def _allocate(self, flat: FlatSpec) -> Tensor:
        """Return a flat tensor of zeros; in pinned memory if offloaded, so that copies do not block."""
        dtype = torch_dtype(flat.dtype)
        if flat.offloaded:
            return host_zeros(flat.elements, dtype, beside=self.device)
        return torch.zeros(flat.elements, dtype=dtype, device=self.device)

    def _shard_slots(self, spec: BufferSpec, first: int) -> dict[str, Slot]:
        """Return the position of each parameter's elements in the flat shard that starts at `first`."""
        offsets = spec.offsets
        slots = {}
        for slot in offsets.slots:
            start = min(max(slot.start + self._interval(slot).start - first, 0), offsets.shard_size)
            shape = torch.Size(self.layouts[slot.name].local_shape(self.coordinate))
            slots[slot.name] = Slot(slot.name, shape, start)
        return slots

    def _fill(self, buffer: FlatBuffer) -> None:
        """Write the initial values of the parameters; free storage that is allocated only while in use."""
        spec = buffer.spec
        with torch.no_grad():
            for slot in spec.offsets.slots:
                value = self.value_of(slot.name)
                if spec.shard is None:
                    buffer.parameters[slot.name].copy_(value)
                else:  # gathered before the first use
                    interval, shard = self._interval(slot), buffer.shard_parameters[slot.name]
                    shard.copy_(value.reshape(-1)[interval.start : interval.stop].view(shard.shape))
                del value  # before the next is read
        buffer.release_parameters()
        buffer.release_gradients()
        buffer.copy_to_device()

    def _interval(self, slot: Slot) -> range:
        """Return the range of a parameter's elements, flattened, that are in this rank's shard."""
        interval = self.layouts[slot.name].interval(self.coordinate)
        return range(slot.shape.numel()) if interval is None else interval


def _stage_view(spec: BufferSpec, whole: Tensor, gradient: Tensor | None) -> StageView:
    slots, trains = spec.offsets.slots, spec.kind.trains
    parameters = {slot.name: _parameter(slot.view_of(whole), trains=trains) for slot in slots}
    if gradient is None:
        return StageView(parameters, None, {})
    for parameter in parameters.values():
        parameter.grad_dtype = None  # what is added to a buffer of another dtype is not cast before
    return StageView(parameters, gradient, {slot.name: slot.view_of(gradient) for slot in slots})


def _parameter(view: Tensor, *, trains: bool) -> nn.Parameter:
    """Return a parameter on the memory of `view`, with its own version counter.

    Through .data, so that the flat tensor can be refilled (by a collective) without autograd taking that for
    a change of a saved weight.
    """
    parameter = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), requires_grad=trains)
    parameter.data = view
    return parameter


def reduction_groups(owners: Owners, kinds: Mapping[str, BufferKind], mesh: Mesh) -> dict[str, Group]:
    """Return for each parameter of this rank the process group over which its gradient is all-reduced.

    The ranks along its kind's `reduced_over`; for a parameter tied across stages also those of each rank of
    `pp` that holds it; and along `tp` as many as its kind's `reduced_neighbours`.
    """
    groups: dict[str, Group] = {}
    known: dict[tuple[tuple[int, ...], tuple[str, ...], int], Group | None] = {}
    for name, stages in owners.items():
        axes, summands = kinds[name].reduced_over, kinds[name].reduced_neighbours
        tied = len(stages) > 1
        key = (stages if tied else (), axes, summands)
        if not tied and summands == 1:
            known[key] = mesh.group(axes)
        elif key not in known:
            together = [stages] if tied else [(stage,) for stage in range(mesh.size("pp"))]
            ranks = reduction_ranks(together, summands, mesh, axes)
            known[key] = mesh.new_group(ranks, "tie" if tied else "copies")
        group = known[key]
        if group is not None:
            groups[name] = group
    return groups


def reduction_ranks(
    together: Iterable[Sequence[int]], summands: int, mesh: Mesh, axis: str | Sequence[str] = "dp_cp"
) -> list[list[int]]:
    """Return the global ranks of each all-reduce group; `together`: `pp` ranks that share a parameter.

    One group for each set of ranks of `pp`, each `summands` neighbours along `tp`, and each index along the
    axes of `dp_cp` that `axis` does not have.
    """
    along = axes_of(axis)
    apart = [other for other in DATA_AXES if other not in along]
    return [
        [
            mesh.rank_at(pp=pp, tp=tp, **place, **fixed)
            for pp in stages
            for place in _places(along, mesh)
            for tp in range(first, first + summands)
        ]
        for stages in together
        for fixed in _places(apart, mesh)
        for first in range(0, mesh.size("tp"), summands)
    ]


def _places(axes: Sequence[str], mesh: Mesh) -> Iterator[dict[str, int]]:
    """Yield all coordinates along `axes`, row-major."""
    for indexes in product(*(range(mesh.size(axis)) for axis in axes)):
        yield dict(zip(axes, indexes, strict=True))
