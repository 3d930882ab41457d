"""The input of lowering besides the schedule: layers and units of a model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from plait.plan.parameter_units import UnitTiming


class LayerIndex(NamedTuple):
    """A layer of the model: its stage and its index within the stage."""

    stage: int
    layer: int


@dataclass(frozen=True)
class LoweringSpec:
    """Input of `lower` besides the schedule: layers per stage and per parameter unit, timing, overlap."""

    layers: tuple[int, ...]
    """Number of layers per stage."""
    units: Mapping[str, tuple[LayerIndex, ...]]
    """The layers that use each unit and add to its gradient."""
    overlap: bool | None = None
    """Whether a full backward runs `I` and `W` layer by layer. None: where no rank waits for its result."""
    timings: Mapping[str, UnitTiming] = field(default_factory=dict)
    """When each unit is gathered, released and reduced. Others are neither sharded nor cast."""
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

    def timing_of(self, unit: str) -> UnitTiming:
        """Return when a unit is gathered, released and reduced."""
        return self.timings.get(unit, UnitTiming())

    @property
    def adds_late(self) -> bool:
        """Whether `I` leaves all weight gradients to `W`, as units that are reduced each micro-batch need.

        Sums are then the same in any schedule.
        """
        return any(timing.scatters == "each" for timing in self.timings.values())

    def units_of_layers(self) -> dict[LayerIndex, tuple[str, ...]]:
        """Return for each layer the units (parameters gathered together) that it uses."""
        found: dict[LayerIndex, tuple[str, ...]] = {}
        for unit, layers in self.units.items():
            for layer in layers:
                found[layer] = (*found.get(layer, ()), unit)
        return found
