"""Sizes, dtypes and offsets of the flat buffers of a model's parameters, from shapes and a plan alone.

Ranks allocate their buffers from these specs (`plait.sharding.unit`), and the memory prediction counts the
same specs (`plait.footprint.parameters`). Every rank decides them for all units, so that it knows which piece
of which parameter any other rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import nn

from plait.layout import Flat, Layout
from plait.sharding.offsets import Offsets, compute_offsets


@dataclass(frozen=True)
class BufferKind:
    """Properties that all parameters of a flat buffer share: dtypes, whether they train and are sharded."""

    dtype: torch.dtype
    """Layers compute with it."""
    master: torch.dtype
    """The optimizer updates it."""
    gradient: torch.dtype
    """Gradients are accumulated in it."""
    reduce: torch.dtype
    """Gradients are reduced in it."""
    trains: bool
    sharded: bool
    """Whether the optimizer updates a piece, or an offloaded copy, of the layers' parameters."""
    summands: int
    """How many neighbours along `tp` hold the same parameter, and each a summand of its gradient."""


@dataclass(frozen=True)
class StoragePolicy:
    """How parameters and gradients are stored: dtypes, sharding and offload.

    A dtype of None is that of the field before it; for `compute`, the parameter's own.
    """

    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    gradient: torch.dtype | None = None
    reduce: torch.dtype | None = None
    shards: bool = False
    """Whether the optimizer updates pieces, or offloaded copies, of the parameters that layers use."""
    keeps_parameters: bool = True
    """Whether whole parameters stay allocated between the layers that use them."""
    keeps_gradients: bool = True
    """Whether whole gradients stay allocated between the layers that add to them."""
    offloads_parameters: bool = False
    """Whether pieces are on the CPU during a step. Between steps they are where their gradients are."""
    offloads_gradients: bool = False
    """Whether reduced gradients are on the CPU, and so the optimizer's state and the pieces between steps."""

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which layers use `parameter`."""
        return self._or(self.compute, parameter.dtype, parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the optimizer updates `parameter`; if frozen, that of the layers."""
        dtype = self.dtype_of(parameter)
        return self._or(self.master, dtype, parameter) if parameter.requires_grad else dtype

    def gradient_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of `parameter` is accumulated."""
        return self._or(self.gradient, self.master_of(parameter), parameter)

    def reduce_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of `parameter` is reduced between ranks."""
        return self._or(self.reduce, self.gradient_of(parameter), parameter)

    def kind_of(self, parameter: nn.Parameter, summands: int) -> BufferKind:
        """Return the `BufferKind` of a parameter whose gradient is summed over `summands` ranks of `tp`."""
        return BufferKind(
            dtype=self.dtype_of(parameter),
            master=self.master_of(parameter),
            gradient=self.gradient_of(parameter),
            reduce=self.reduce_of(parameter),
            trains=parameter.requires_grad,
            # A frozen parameter has neither gradient nor state: it is sharded only where parameters are.
            sharded=self.shards and (parameter.requires_grad or not self.keeps_parameters),
            summands=summands,
        )

    @staticmethod
    def _or(asked: torch.dtype | None, default: torch.dtype, parameter: nn.Parameter) -> torch.dtype:
        return default if asked is None or not parameter.is_floating_point() else asked


@dataclass(frozen=True)
class FlatSpec:
    """Size, dtype and device of one flat tensor of a buffer."""

    elements: int
    dtype: torch.dtype
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
    policy: StoragePolicy

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the buffer's parameters."""
        return tuple(slot.name for slot in self.offsets.slots)

    @cached_property
    def whole(self) -> FlatSpec:
        """Spec of the flat tensor of the whole (gathered) parameters, which layers use."""
        kept = not self.kind.sharded or self.policy.keeps_parameters
        return FlatSpec(self.offsets.size, self.kind.dtype, kept)

    @cached_property
    def has_pieces(self) -> bool:
        """Whether the optimizer's parameters are not the layers' own, but shards, copies or views of them."""
        kind = self.kind
        return kind.sharded or kind.master != kind.dtype or (kind.trains and kind.gradient != kind.master)

    @cached_property
    def piece(self) -> FlatSpec | None:
        """Spec of the flat tensor that the optimizer updates; None where that is `whole` or a view of it."""
        offloaded = self.policy.offloads_parameters
        is_view = self.whole.kept and self.kind.master == self.kind.dtype and not offloaded
        if is_view or not self.has_pieces:
            return None
        return FlatSpec(self.offsets.piece, self.kind.master, offloaded=offloaded)

    @cached_property
    def device_copy(self) -> FlatSpec | None:
        """Spec of the optimizer's GPU copy of offloaded pieces; None unless only parameters are offloaded."""
        if self.piece is None or not self.kind.trains or not self.policy.offloads_parameters:
            return None
        return None if self.policy.offloads_gradients else FlatSpec(self.offsets.piece, self.kind.master)

    @cached_property
    def gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that backwards add to, one per stage of a rank; None if frozen."""
        if not self.kind.trains:
            return None
        kept = not self.kind.sharded or self.policy.keeps_gradients
        return FlatSpec(self.offsets.size, self.kind.gradient, kept)

    @cached_property
    def piece_gradient(self) -> FlatSpec | None:
        """Spec of the flat gradient that the optimizer reads; None where it is `gradient` or a view of it."""
        if self.gradient is None or not self.has_pieces:
            return None
        offloaded = self.policy.offloads_gradients
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


def build_buffer_specs(
    units: Mapping[str, Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    summed: Mapping[str, int],
    policy: StoragePolicy,
    ranks: int,
) -> BufferSpecs:
    """Return by unit (parameters gathered together) the specs of its flat buffers, one per `BufferKind`.

    Sharded buffers are cut into `ranks` pieces. `units`: the parameters of each unit. `layouts` are over
    `tp`. `summed` gives for each parameter how many neighbours along `tp` have a summand of its gradient.
    Offsets are those of the first rank along `tp`, which has the largest pieces; so they are equal on all.
    """
    specs = {}
    for unit, names in units.items():
        shapes: dict[BufferKind, dict[str, torch.Size]] = {}
        for name in names:
            kind = policy.kind_of(parameters[name], summed[name])
            largest = layouts[name].local_shape([0] * len(layouts[name].axes))
            shapes.setdefault(kind, {})[name] = torch.Size(largest)
        specs[unit] = tuple(
            BufferSpec(kind, compute_offsets(members, ranks if kind.sharded else 1), policy)
            for kind, members in shapes.items()
        )
    return specs


def piece_layouts(specs: BufferSpecs, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of the pieces that optimizers update: those over `tp`, cut over `shard` and `cp`."""
    pieces = dict(layouts)
    for spec in (spec for buffers in specs.values() for spec in buffers if spec.kind.sharded):
        for slot in spec.offsets.slots:
            layout = layouts[slot.name]
            placements = dict(zip(layout.axes, layout.placements, strict=True))
            bounds, cp = spec.offsets.bounds(slot), layout.axis_degrees.get("cp", 1)
            flat = {"shard": Flat(bounds[::cp])} | ({"cp": Flat(bounds)} if cp > 1 else {})
            pieces[slot.name] = Layout(layout.shape, layout.axis_degrees, placements | flat)
    return pieces
