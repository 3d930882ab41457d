"""The distribution of a model's parameters and buffers over the ranks of a plan, without tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.plan.axes import rank_at
from plait.plan.layout.layout import Layout
from plait.plan.plan import Plan


@dataclass(frozen=True)
class ShardPlan:
    """Which shard of each parameter and buffer of a model each rank of a plan holds."""

    plan: Plan
    layouts: Mapping[str, Layout]
    """The layout of each parameter and its optimizer state, in the order in which ranks save them."""
    buffer_shapes: Mapping[str, tuple[int, ...]]
    """The shape of each saved buffer; every rank of its stage holds all of it."""
    aliases: Mapping[str, str]
    """For each further name of a shared parameter, its first name."""
    owners: Mapping[str, tuple[int, ...]]
    """The ranks along `pp` that hold each parameter and buffer."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of each parameter and buffer."""
        return {name: layout.shape for name, layout in self.layouts.items()} | dict(self.buffer_shapes)


def replica_ranks(
    layout: Layout, coordinate: Mapping[str, int], stages: Iterable[int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ranks, in pipeline `stages`, that hold the same shard as the rank at `coordinate`."""
    alike = [dict(zip(layout.axes, there, strict=True)) for there in layout.replicas(coordinate)]
    return tuple(sorted(rank_at({"pp": stage, **there}, sizes) for stage in stages for there in alike))
