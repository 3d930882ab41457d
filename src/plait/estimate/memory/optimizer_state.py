"""The memory of an optimizer: tensors of the size of each parameter, and what owners of whole parts keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.engine.blueprint import Blueprint
from plait.estimate.memory.owner_needs import Moments, OwnerNeeds, by_stage, muon_of, owner_needs
from plait.optimizers.owner_work import found_matrices

OF_MATRICES, OF_OTHERS = 1, 2
"""Tensors that Muon keeps for a hidden matrix, its momentum, and AdamW for other parameters."""


@dataclass(frozen=True)
class OptimizerState:
    """The tensors that an optimizer keeps on the ranks of a plan."""

    of_all: int
    of_parameters: Mapping[str, int]
    """How many tensors of its size a parameter has, by name; `of_all` without an entry."""
    of_owners: Mapping[int, OwnerNeeds]
    """By rank of `pp`, what the rank of that stage needs that needs most; nothing without an entry."""

    def tensors_of(self, name: str) -> int:
        """Return how many tensors of its size are kept for a parameter."""
        return self.of_parameters.get(name, self.of_all)


def optimizer_state(blueprint: Blueprint, moments: Moments) -> OptimizerState:
    """Return what the optimizer of a model keeps under a plan."""
    if isinstance(moments, int):
        return OptimizerState(moments, {}, {})
    stages = enumerate(by_stage(blueprint, owner_needs(blueprint, moments)))
    most = {stage: max(ranks, key=lambda one: one.buffers + one.copies) for stage, ranks in stages}
    return OptimizerState(*tensor_counts(blueprint, moments), most)


def tensor_counts(blueprint: Blueprint, moments: Moments) -> tuple[int, dict[str, int]]:
    """Return how many tensors of its size a rank's shard of a parameter has, and by name where it differs."""
    if isinstance(moments, int):
        return moments, {}
    muon = muon_of(moments)
    if muon is None:
        return 0, {}
    found = found_matrices(blueprint, muon)
    return OF_OTHERS, {name: OF_MATRICES for name, one in found.items() if one.parts}
