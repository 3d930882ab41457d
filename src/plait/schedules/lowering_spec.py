"""The input of lowering besides the schedule: layers, units and sharding of a model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.plan import Plan


class LayerIndex(NamedTuple):
    """A layer of the model: its stage and its index within the stage."""

    stage: int
    layer: int


@dataclass(frozen=True)
class Sharding:
    """Which gather and reduction instructions a program contains, and how often.

    `gathers`: whether parameters are gathered, once per step or before each use, with a release after it.
    `scatters`: whether gradients are reduce-scattered over `shard_cp`, after the last micro-batch or each.
    `allocates`: whether a unit's whole gradient is allocated only while it is accumulated.
    """

    gathers: Literal["never", "once", "each use"] = "never"
    scatters: Literal["never", "last", "each"] = "never"
    allocates: bool = False


WHOLE = Sharding()
"""Every rank of `dp` keeps all parameters and all gradients."""


def sharding_of(plan: Plan) -> Sharding:
    """Return which gather and reduction instructions the plan's strategy needs, and how often.

    A strategy that keeps whole gradients gains nothing by reducing them early: they are reduced last.
    """
    if not plan.shards:
        return Sharding(gathers="once") if plan.has_master else WHOLE
    allocates = plan.strategy in ("gradients", "full")
    return Sharding(
        gathers="each use" if plan.strategy == "full" else "once",
        scatters=plan.reduce if allocates else "last",
        allocates=allocates,
    )


@dataclass(frozen=True)
class LoweringSpec:
    """Input of `lower` besides the schedule: layers per stage and per parameter unit, sharding, overlap."""

    layers: tuple[int, ...]
    """Number of layers per stage."""
    units: Mapping[str, tuple[LayerIndex, ...]]
    """The layers that use each unit and add to its gradient."""
    overlap: bool | None = None
    """Whether a full backward runs `I` and `W` layer by layer. None: where no rank waits for its result."""
    sharding: Sharding = WHOLE
    posts_late: bool = False
    """Whether receives are posted one action ahead, for NCCL; else as early as rendezvous sends need it."""
    replicated: bool = True
    """Whether other ranks than those of `pp` may add to the same gradients."""
    loss_computes_logits: bool = False
    """Whether the loss uses the last layer's parameters, and adds to their gradients."""

    @property
    def last_layer(self) -> LayerIndex:
        """The last layer of the model."""
        return LayerIndex(len(self.layers) - 1, self.layers[-1] - 1)

    def units_of_layers(self) -> dict[LayerIndex, tuple[str, ...]]:
        """Return for each layer the units (parameters gathered together) that it uses."""
        found: dict[LayerIndex, tuple[str, ...]] = {}
        for unit, layers in self.units.items():
            for layer in layers:
                found[layer] = (*found.get(layer, ()), unit)
        return found
