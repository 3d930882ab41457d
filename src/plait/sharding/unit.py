"""Units: parameters that are gathered and reduced together, in one flat buffer per kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.comm.shared_tensors import shared_zeros
from plait.layout import Layout
from plait.sharding.buffer_specs import BufferKind
from plait.sharding.flat_buffer import FlatBuffer, StageView, free_storage
from plait.sharding.offsets import Offsets, Slot
from plait.sharding.storage_policy import StoragePolicy


@dataclass(eq=False)
class Unit:
    """A layer's parameters, or one that several layers share; the name is the layer's or the parameter's."""

    name: str
    buffers: tuple[FlatBuffer, ...]
    stages: tuple[int, ...]
    """Those of this rank that use it, in order."""

    def parameters_of(self, stage: int) -> dict[str, nn.Parameter]:
        """What the layers of one stage use, by full name in the model."""
        return {
            name: parameter
            for buffer, twin in self._by_stage(stage)
            for name, parameter in (twin or buffer).parameters.items()
        }

    def gradients_of(self, stage: int) -> dict[tuple[str, int], Tensor]:
        """What the backward of a stage adds to, by full name in the model and the first stage to do so."""
        return {
            (name, stage if twin else self.stages[0]): view
            for buffer, twin in self._by_stage(stage)
            for name, view in (twin or buffer).gradients.items()
        }

    def _by_stage(self, stage: int) -> list[tuple[FlatBuffer, StageView | None]]:
        """The buffers, with their twins where this stage has them."""
        place = self.stages.index(stage)
        own = [buffer.twins[place - 1] if place and buffer.twins else None for buffer in self.buffers]
        return list(zip(self.buffers, own, strict=True))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What layers use, those of the first stage, by full name in the model."""
        return {name: parameter for buffer in self.buffers for name, parameter in buffer.parameters.items()}

    @property
    def pieces(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by full name in the model."""
        return {name: piece for buffer in self.buffers for name, piece in buffer.pieces.items()}

    @property
    def trainable(self) -> tuple[FlatBuffer, ...]:
        """The buffers that have gradients."""
        return tuple(buffer for buffer in self.buffers if buffer.gradient is not None)


@dataclass(frozen=True)
class UnitFactory:
    """Makes the units of one rank. All ranks of a group make theirs in one order (see `shared_zeros`)."""

    policy: StoragePolicy
    layouts: Mapping[str, Layout]
    """Of the pieces."""
    coordinate: Mapping[str, int]
    shard: Group
    """Between whose ranks buffers are cut."""
    rest: Mapping[str, Group]
    """Per parameter the ranks over which its gradient, or its piece of one, is summed besides."""
    value_of: Callable[[str], Tensor]
    """What this rank's layers hold of a parameter at first."""

    def make(self, name: str, kinds: Mapping[BufferKind, Offsets], stages: tuple[int, ...]) -> Unit:
        """A unit with real parameters, filled. `stages` are those of this rank that use it, in order."""
        buffers = (self._buffer(kind, slots, len(stages) - 1) for kind, slots in kinds.items())
        return Unit(name, tuple(buffers), stages)

    def _buffer(self, kind: BufferKind, slots: Offsets, twins: int) -> FlatBuffer:
        slots = replace(slots, places=tuple(self._here(slot) for slot in slots.places))
        policy = self.policy
        group = self.rest.get(slots.places[0].name) if kind.trains else None
        shard = self.shard if kind.cut else None
        whole = torch.zeros(slots.size, dtype=kind.dtype, device=policy.device)
        gradient = self._whole_gradient(kind, slots, shard or group) if kind.trains else None
        parameters = _parameters(slots, whole, kind)
        gradients = {} if gradient is None else _views(slots, gradient)
        buffer = FlatBuffer(
            kind=kind,
            slots=slots,
            shard=shard,
            group=group,
            whole=whole,
            parameters=parameters,
            piece=whole,
            pieces=parameters,
            places=self._places(slots),
            gradient=gradient,
            gradients=gradients,
            piece_gradient=gradient,
            piece_gradients=gradients,
            twins=tuple(self._twin(kind, slots, whole) for _ in range(twins) if kind.trains),
            visits=kind.trains and policy.offloads_parameters and not policy.offloads_gradients,
            keeps_whole=not kind.cut or policy.keeps_parameters,
            keeps_gradient=not kind.cut or policy.keeps_gradients,
        )
        self._cut(buffer)
        self._fill(buffer)
        return buffer

    def _here(self, slot: Slot) -> Slot:
        """The place of a parameter with the shape that this rank of `tp` has of it."""
        return replace(slot, shape=torch.Size(self.layouts[slot.name].sizes(self.coordinate)))

    def _whole_gradient(self, kind: BufferKind, slots: Offsets, group: Group | None) -> Tensor:
        if kind.cut and not self.policy.keeps_gradients:
            return torch.zeros(slots.size, dtype=kind.gradient, device=self.policy.device)
        return shared_zeros(slots.size, kind.gradient, self.policy.device, group)

    def _twin(self, kind: BufferKind, slots: Offsets, whole: Tensor) -> StageView:
        gradient = torch.zeros(slots.size, dtype=kind.gradient, device=self.policy.device)
        return StageView(_parameters(slots, whole, kind), gradient, _views(slots, gradient))

    def _cut(self, buffer: FlatBuffer) -> None:
        """Give the optimizer tensors of its own, where they are not what layers use."""
        kind, policy, size = buffer.kind, self.policy, buffer.slots.piece
        same_dtypes = kind.dtype == kind.master and (kind.gradient == kind.master or not kind.trains)
        if same_dtypes and not kind.cut:
            return
        is_part = buffer.keeps_whole and kind.master == kind.dtype and not policy.offloads_parameters
        buffer.piece = buffer.own if is_part else self._zeros(size, kind.master, policy.home)
        buffer.pieces = {
            name: _parameter(buffer.place_in(name, buffer.piece), trains=kind.trains)
            for name in buffer.places
        }
        if buffer.gradient is not None:
            is_part = buffer.keeps_gradient and kind.gradient == kind.master and not policy.offloads_gradients
            home = policy.gradient_home
            buffer.piece_gradient = buffer.own_gradient if is_part else self._zeros(size, kind.master, home)
            buffer.piece_gradients = {
                name: buffer.place_in(name, buffer.piece_gradient) for name in buffer.places
            }

    def _zeros(self, size: int, dtype: torch.dtype, home: torch.device) -> Tensor:
        """Zeros; on the CPU pinned, where layers run on a device that copies from there without waiting."""
        pinned = home.type == "cpu" and self.policy.device.type == "cuda"
        return torch.zeros(size, dtype=dtype, device=home, pin_memory=pinned)

    def _places(self, slots: Offsets) -> dict[str, tuple[int, torch.Size]]:
        """Where this rank's parts of the parameters lie in a flat piece."""
        begin = self.shard.index * slots.piece if slots.pieces > 1 else 0
        places = {}
        for slot in slots.places:
            start = min(max(slot.start + self._interval(slot).start - begin, 0), slots.piece)
            places[slot.name] = start, torch.Size(self.layouts[slot.name].local_shape(self.coordinate))
        return places

    def _fill(self, buffer: FlatBuffer) -> None:
        """Write the initial values to what the optimizer updates, and let go of what is not kept."""
        apart = buffer.has_pieces and buffer.piece.data_ptr() != buffer.own.data_ptr()
        with torch.no_grad():
            for slot in buffer.slots.places:
                value = self.value_of(slot.name)
                if apart:  # gathered before the first use
                    interval = self._interval(slot)
                    piece = buffer.pieces[slot.name]
                    piece.copy_(value.reshape(-1)[interval.start : interval.stop].view(piece.shape))
                else:
                    buffer.parameters[slot.name].copy_(value)
                del value  # before the next is read
        gone = [] if buffer.keeps_whole else [buffer.whole]
        for flat in (*gone, *([] if buffer.keeps_gradient else buffer.whole_gradients)):
            free_storage(flat)
        buffer.return_to_device()

    def _interval(self, slot: Slot) -> range:
        """The elements of a parameter, as this rank's layers have it, that its piece is made of."""
        interval = self.layouts[slot.name].interval(self.coordinate)
        return range(slot.shape.numel()) if interval is None else interval


def _parameters(slots: Offsets, whole: Tensor, kind: BufferKind) -> dict[str, nn.Parameter]:
    parameters = {name: _parameter(view, trains=kind.trains) for name, view in _views(slots, whole).items()}
    if kind.trains:
        for parameter in parameters.values():
            parameter.grad_dtype = kind.gradient
    return parameters


def _views(slots: Offsets, flat: Tensor) -> dict[str, Tensor]:
    return {slot.name: slot.view_of(flat) for slot in slots.places}


def _parameter(view: Tensor, *, trains: bool) -> nn.Parameter:
    """A parameter on `view`, with a version counter of its own.

    Through .data, so that the flat tensor can be refilled (by a collective) without autograd taking that for
    a change of a saved weight.
    """
    parameter = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), requires_grad=trains)
    parameter.data = view
    return parameter
