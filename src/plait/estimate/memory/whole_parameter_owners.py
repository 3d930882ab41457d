"""Memory and work of ranks that own whole matrices or parameters (`Muon`, `Owned`), under a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from plait.engine.blueprint import Blueprint
from plait.errors import PlanError
from plait.estimate.memory.measured_optimizer_state import measured_state
from plait.optimizers.hidden_matrices import ParameterMatrices
from plait.optimizers.muon import Muon
from plait.optimizers.optimizer_makers import (
    MakeOptimizer,
    MuonSettings,
    class_and_settings_of_owned,
    class_of,
    muon_settings,
    takes_engine,
)
from plait.optimizers.part_owners import held_boxes
from plait.optimizers.predicted_owner_work import (
    OwnerWork,
    found_matrices,
    matrix_parts_of,
    matrix_shapes,
    matrix_work,
    parameter_work,
)
from plait.plan.argument_checks import require_whole
from plait.plan.axes import sizes_of_plan

Moments: TypeAlias = int | Literal["muon"] | MakeOptimizer
"""How many tensors of a parameter's size an optimizer keeps for it; or an optimizer of whole parts, as `fit`
takes it: `plait.Muon`, which "muon" is too, or a `partial` of it or of `plait.Owned`."""


OF_MATRICES, OF_OTHERS = 1, 2
"""Tensors that Muon keeps for a hidden matrix, its momentum, and AdamW for other parameters."""


def require_moments(moments: object) -> None:
    """Raise PlanError unless `moments` is a number of tensors, "muon", or makes a Muon or an Owned."""
    if callable(moments):
        if not takes_engine(moments):
            name = getattr(class_of(moments), "__name__", repr(moments))
            raise PlanError(
                f"moments is {name}: give the number of tensors of a parameter's size that it keeps, or "
                "plait.Muon, or a partial of it or of plait.Owned."
            )
        if class_of(moments) is not Muon:
            class_and_settings_of_owned(moments)
    elif isinstance(moments, str) and moments != "muon":
        raise PlanError(f"moments is {moments!r}: give a whole number of at least 0, or 'muon'.")
    elif moments != "muon":
        require_whole("moments", moments, PlanError, least=0)


def muon_of(moments: Moments) -> MuonSettings | None:
    """Return the settings of Muon where `moments` stands for one; None for other optimizers."""
    if moments == "muon":
        return MuonSettings()
    return muon_settings(moments) if callable(moments) and class_of(moments) is Muon else None


@dataclass(frozen=True)
class OwnerNeeds:
    """Memory and work of one rank for the whole matrices or parameters that it updates for all ranks."""

    kept: int
    """Bytes of state: of Muon's for the rank's shards; of `Owned` for parameters, and their copies."""
    buffers: int
    """Bytes of the parts as they are exchanged, and of what the rank sends and receives."""
    exchanged: tuple[int, int]
    """Bytes that it sends or receives in the two all-to-alls."""
    updated: int = 0
    """Bytes that the optimizer reads and writes of whole parameters, their gradients and state."""
    shapes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """How many matrices with these out and in features the rank orthogonalizes."""


def owner_needs(blueprint: Blueprint, moments: Moments) -> tuple[OwnerNeeds, ...]:
    """Return each rank's memory and work for whole parameters that it updates for all; empty without any.

    `moments`: an optimizer of whole parts, or a number of tensors.
    """
    if isinstance(moments, int):
        return ()
    muon = muon_of(moments)
    return tuple(_of_owned(blueprint, moments) if muon is None else _of_muon(blueprint, muon))


def by_stage(blueprint: Blueprint, needs: Sequence[OwnerNeeds]) -> list[Sequence[OwnerNeeds]]:
    """Divide the needs of all ranks, in rank order, into those of each pipeline stage's ranks."""
    ranks = blueprint.plan.world // blueprint.plan.pp
    return [needs[first : first + ranks] for first in range(0, len(needs), ranks)]


def _of_muon(blueprint: Blueprint, muon: MuonSettings) -> Iterator[OwnerNeeds]:
    found = found_matrices(blueprint, muon)
    parts = [part for _, part in matrix_parts_of(found)]
    state = _bytes_of_shards(blueprint, tensor_counts(found))
    for rank, work in enumerate(matrix_work(blueprint, found, muon)):
        shapes = matrix_shapes(work, parts)
        yield OwnerNeeds(state.get(rank, 0), work.buffered_bytes, work.exchanged_bytes, shapes=shapes)


def tensor_counts(found: Mapping[str, ParameterMatrices]) -> dict[str, int]:
    """Return by name how many tensors of a parameter's size Muon keeps: 1 for hidden matrices, else 2."""
    return {name: OF_MATRICES if one.parts else OF_OTHERS for name, one in found.items()}


def _bytes_of_shards(blueprint: Blueprint, counts: Mapping[str, int]) -> Mapping[int, int]:
    """Return by rank the bytes of `counts` tensors for each shard of the parameters that it holds."""
    found = Counter[int]()
    held = held_boxes(blueprint.shard_plan, sizes_of_plan(blueprint.plan), counts)
    for name, boxes_of in held.items():
        each = counts[name] * blueprint.kinds[name].master.itemsize
        for rank, boxes in boxes_of.items():
            found[rank] += each * sum(box.numel for box in boxes)
    return found


def _of_owned(blueprint: Blueprint, moments: Moments) -> Iterator[OwnerNeeds]:
    assert callable(moments)
    kind, settings = class_and_settings_of_owned(moments)
    known: dict[tuple[tuple[int, ...], str], int] = {}

    def sizes(work: OwnerWork) -> Iterator[tuple[int, int]]:
        """Yield the bytes of each parameter that a rank owns, and those of its state."""
        for part in work.parts:
            master = blueprint.kinds[part.parameter].master
            key = part.box.sizes, master.name
            if key not in known:
                known[key] = measured_state(kind, settings, part.box.sizes, getattr(torch, master.name))
            yield part.box.numel * master.itemsize, known[key]

    for work in parameter_work(blueprint):
        whole = state = 0
        for of_parameter, of_state in sizes(work):
            whole, state = whole + of_parameter, state + of_state
        # Parameter and state are read and written, the gradient read, the result written for the exchange.
        updated = 2 * (whole + state) + 2 * whole
        yield OwnerNeeds(whole + state, work.buffered_bytes, work.exchanged_bytes, updated)
