"""Moves an engine's tensors to the ranks of the engine that replaces it, unit by unit, and frees them.

Each unit's memory is allocated when it is built, filled, and then the old one's is freed: so a rank has the
shards of one unit more than it needs for what is left of the old run and what is there of the new one.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.checkpoint.optimizer_state import empty_state
from plait.checkpoint.rank_contents import parameter_key
from plait.engine.engine import Engine
from plait.engine.resharding.planned_transfers import GRADIENT, MovedTensor, Moves, PlacedBlueprint, Round
from plait.engine.resharding.rank_report import HeldTensor, held_tensors
from plait.engine.sharding.unit import Unit
from plait.engine.tensor_sources import TensorLocation
from plait.plan.layout.routes import BoxTransfer
from plait.plan.layout.shards import ShardBox, shard_boxes
from plait.ranks.box_exchange import LocalBoxes, exchange_boxes
from plait.ranks.mesh import Mesh


class LeavingValues:
    """This rank's tensors of the old engine and optimizers, freed once they are sent."""

    def __init__(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        """Take the engine's units; it runs no more steps, and its layers are freed."""
        self._units, self._optimizers = engine.runtime.units, optimizers
        self._parameters = dict(engine.named_parameters())
        self._coordinate = engine.mesh.coordinate
        self._held: dict[str, HeldTensor] = dict(held_tensors(engine.runtime, optimizers))
        engine.retire()
        gc.collect()  # layers refer to each other, and to views of the units' memory

    def boxes(self, key: str) -> LocalBoxes | None:
        """Return this rank's shard of a tensor with its boxes; None where it has none."""
        held = self._held.get(key)
        if held is None:
            return None
        where = {"world": 0} if held.layout.axes == ("world",) else self._coordinate
        return LocalBoxes(held.shard.contiguous(), shard_boxes(held.layout, where))

    def discard_round(self, tensors: Round) -> None:
        """Free the optimizer state of tensors that have been sent to the new layout."""
        for one in tensors.tensors:
            held = self._held.pop(one.key, None)
            if held is not None and one.entry not in ("", GRADIENT):
                for optimizer in self._optimizers:
                    optimizer.state.get(self._parameters[one.parameter], {}).pop(one.entry, None)

    def discard_unit(self, name: str) -> None:
        """Free the parameters and gradients of a unit (parameters gathered together) that has been sent."""
        unit = self._units.get(name)
        for buffer in () if unit is None else unit.buffers:
            buffer.discard()


@dataclass(eq=False)
class ArrivingValues:
    """The `TensorSource` of the new engine: parameters, gradients and state arrive when a unit is built.

    Every rank of the world takes part in every round, also one that leaves, or has nothing to send.
    """

    moves: Moves
    after: PlacedBlueprint
    places: Mapping[str, TensorLocation]
    """The model's parameters and buffers, by first name."""
    mesh: Mesh
    leaving: LeavingValues | None
    """None on a rank that joins."""
    options: Mapping[str, Mapping[str, Any]]
    """The options of each parameter's group, by name."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each tensor where it comes from, by key."""
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The optimizer state that has arrived, by parameter and entry."""

    def read(self, name: str) -> Tensor:
        """Receive and return the buffer `name`; of a parameter, whose values arrive later, return zeros."""
        place = self.places[name]
        if not place.is_buffer:
            return torch.zeros((), dtype=place.tensor.dtype).expand(place.tensor.shape)
        buffer = torch.empty(
            place.tensor.shape, dtype=self.dtypes[parameter_key(name)], device=self.mesh.device
        )
        self._receive_buffer(name, LocalBoxes.whole(buffer))
        return buffer

    def skip(self, name: str) -> None:
        """Take part in moving a buffer that this rank does not need: send its copy to ranks that do."""
        if self.places[name].is_buffer:
            self._receive_buffer(name, None)

    def unit_built(self, name: str, unit: Unit | None) -> None:
        """Receive the values of a new unit, and free the old one; `unit` is None on ranks without it."""
        for one in self.moves.units[name]:
            targets = {} if unit is None else self._targets(one, unit)
            self._exchange(one.transfers, targets, one.dtype)
            if self.leaving is not None:
                self.leaving.discard_round(one)
        if self.leaving is not None:
            self.leaving.discard_unit(name)

    def send_all(self) -> None:
        """Take part in moving all tensors, as a rank that will hold nothing of the new run."""
        for name in self.after.blueprint.buffer_specs:
            self.unit_built(name, None)
        for name in self.places:
            self.skip(name)

    def _targets(self, tensors: Round, unit: Unit) -> dict[str, LocalBoxes]:
        """Return the memory of a round's tensors on this rank, by key; allocates optimizer state."""
        found = {}
        for one in tensors.tensors:
            memory = self._memory_of(one, unit, tensors.dtype)
            boxes: tuple[ShardBox, ...] = shard_boxes(one.after, self.mesh.coordinate)
            found[one.key] = LocalBoxes(memory, boxes)
        return found

    def _memory_of(self, tensor: MovedTensor, unit: Unit, dtype: torch.dtype) -> Tensor:
        shard = unit.shard_parameters[tensor.parameter]
        if tensor.entry == "":
            return shard.detach()
        if tensor.entry == GRADIENT:
            buffer = next(one for one in unit.trainable if tensor.parameter in one.shard_gradients)
            shard.grad = buffer.shard_gradients[tensor.parameter]
            return shard.grad.detach()
        made, _ = empty_state(
            tensor.entry,
            tensor.shape,
            dtype,
            shard,
            self.after.blueprint.layouts[tensor.parameter],
            self.options[tensor.parameter],
            same_dtype=dtype == self.dtypes[parameter_key(tensor.parameter)],
        )
        self.state.setdefault(tensor.parameter, {})[tensor.entry] = made
        return made

    def _receive_buffer(self, name: str, target: LocalBoxes | None) -> None:
        key = parameter_key(name)
        targets = {} if target is None else {key: target}
        self._exchange(self.moves.buffers[name], targets, self.dtypes[key])

    def _exchange(
        self, transfers: Sequence[BoxTransfer], targets: Mapping[str, LocalBoxes], dtype: torch.dtype
    ) -> None:
        group, sources = self.mesh.all_ranks, dict[str, LocalBoxes]()
        for key in {one.tensor for one in transfers if one.sender == group.rank}:
            held = None if self.leaving is None else self.leaving.boxes(key)
            assert held is not None, "a rank sends what it has told that it holds"
            sources[key] = held
        most = self.moves.most
        exchange_boxes(transfers, sources, targets, group, dtype, self.mesh.device, most=most)
