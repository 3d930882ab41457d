"""The memory of an optimizer: tensors of each parameter's size, or the state of owners of whole parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.engine.blueprint import Blueprint
from plait.estimate.memory.memory_ledger import Category, MemoryBlock
from plait.estimate.memory.whole_parameter_owners import Moments, OwnerNeeds, by_stage, owner_needs


@dataclass(frozen=True)
class OptimizerState:
    """Sizes of the optimizer state under a plan: tensors per parameter, or the bytes of owner ranks."""

    tensors: int
    """How many tensors of its size each shard of a parameter has."""
    of_owners: Mapping[int, OwnerNeeds]
    """By rank of `pp`, what the rank of that stage needs that needs most; nothing without an entry."""

    def blocks_of_owner(self, rank: int, *, offloads: bool) -> list[MemoryBlock]:
        """Return the memory blocks that Muon or `Owned` keeps on the largest rank of a pipeline stage.

        `offloads`: whether the optimizer's parameters, and so its state, are on the host.
        """
        if rank not in self.of_owners:
            return []
        needs = self.of_owners[rank]
        return [
            MemoryBlock(needs.kept, Category.STATE, offloads),
            MemoryBlock(needs.buffers, Category.STATE),
        ]


def optimizer_state(blueprint: Blueprint, moments: Moments) -> OptimizerState:
    """Return the sizes of the state that the optimizer `moments` keeps under the blueprint's plan."""
    if isinstance(moments, int):
        return OptimizerState(moments, {})
    stages = enumerate(by_stage(blueprint, owner_needs(blueprint, moments)))
    most = {stage: max(ranks, key=lambda one: one.kept + one.buffers) for stage, ranks in stages}
    return OptimizerState(0, most)
