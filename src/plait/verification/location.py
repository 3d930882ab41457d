"""Where a step's numbers stand: phase, layer, micro-batch; and which of two places comes first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor


class StepPhase(StrEnum):
    """What a step does, in the order in which one thing depends on another."""

    BATCH = "cut into micro-batches"
    INITIAL = "initial values"
    INPUT = "input"
    PARAMETERS = "gathered parameters"
    MESSAGE = "forward message"
    FORWARD = "forward"
    LOSS = "loss"
    LOSS_GRADIENT = "loss gradient"
    GRADIENT_MESSAGE = "gradient message"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    REDUCTION = "reduction"
    MEAN_LOSS = "mean loss"
    NORM = "norm"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"


FORWARD = (
    StepPhase.BATCH,
    StepPhase.INITIAL,
    StepPhase.INPUT,
    StepPhase.PARAMETERS,
    StepPhase.MESSAGE,
    StepPhase.FORWARD,
)
BACKWARD = (StepPhase.GRADIENT_MESSAGE, StepPhase.INPUT_GRADIENT, StepPhase.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Location:
    """One tensor of one step, on whichever rank."""

    step: int
    phase: StepPhase
    layer: int | None = None
    """Of the model, counted from 0; of a message the layer that it comes from (forward) or is for."""
    microbatch: int | None = None
    """Of the global batch: data-parallel rank · micro-batches + its own micro-batch."""
    name: str = ""
    """Of a parameter, and a tensor of its optimizer state."""
    tensor: int = 0
    """Which of several tensors between layers."""

    def order(self, layers: int) -> tuple[int, int, int, int, int, str]:
        """Sorts places of a model of `layers` layers so that a cause stands before its consequences."""
        phases = list(StepPhase)
        phase = phases.index(self.phase)
        layer = -1 if self.layer is None else self.layer
        if self.phase in FORWARD:
            # A message brings what the layer before gave. Without a layer: before all layers; without a
            # micro-batch (as what a layer's parameters are): before all of the layer's.
            location = (0, 2 * layer + (self.phase is StepPhase.MESSAGE) - 2 * (self.layer is None))
        elif self.phase in BACKWARD:
            # Layers last to first; a message comes before what the layer does with it.
            location = (phases.index(BACKWARD[0]), 3 * (layers - layer) + BACKWARD.index(self.phase))
        else:
            location = (phase, 0)
        return (
            self.step,
            *location,
            -1 if self.microbatch is None else self.microbatch,
            self.tensor,
            self.name,
        )


class RecordKey(NamedTuple):
    """The name of a recorded tensor within a moment."""

    kind: str
    """`output`, `gradient` (of that output), `contribution` (to a parameter's gradient), `total`, `inside` (a
    sketch: see `Sketches`), …"""
    layer: int = -1
    """Whose output or contribution it is; -1: the batch's, or the step's."""
    name: str = ""


Records = dict[RecordKey, Tensor]
"""What was computed at one moment."""
OF_PARAMETERS = ("contribution", "final", "clipped", "value", "state")
"""Kinds whose name is that of a parameter; of a state it is followed by `/` and the state's own."""


class RecordScope(NamedTuple):
    """A step, and one of its micro-batches (of the global batch), or the step as a whole."""

    step: int
    microbatch: int


WHOLE_STEP = -1
"""In the place of a micro-batch: the step as a whole."""
