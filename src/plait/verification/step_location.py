"""Location of a tensor in a step (phase, layer, micro-batch), and the key under which it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor


class StepPhase(StrEnum):
    """The phases of a step, in the order in which they depend on each other."""

    BATCH = "cut into micro-batches"
    INITIAL = "initial values"
    INPUT = "input"
    PARAMETERS = "gathered parameters"
    MESSAGE = "forward message"
    ROUTING = "routing"
    FORWARD = "forward"
    SCALES = "forward scales"
    LOSS = "loss"
    LOSS_GRADIENT = "loss gradient"
    GRADIENT_MESSAGE = "gradient message"
    RECOMPUTED_ROUTING = "recomputed routing"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    GRADIENT_SCALES = "backward scales"
    REDUCTION = "reduction"
    MEAN_LOSS = "mean loss"
    EXPERT_LOAD = "load of experts"
    NORM = "norm"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    LOAD = "load"


PHASES = tuple(StepPhase)
FORWARD = PHASES[: PHASES.index(StepPhase.SCALES) + 1]
BACKWARD = PHASES[PHASES.index(StepPhase.GRADIENT_MESSAGE) : PHASES.index(StepPhase.GRADIENT_SCALES) + 1]
WITHIN_LAYER = {StepPhase.PARAMETERS: 0, StepPhase.ROUTING: 0, StepPhase.SCALES: 2, StepPhase.MESSAGE: 3}
"""By what comes before (0) and after (2, 3) a layer's output. Scales follow the values that they change: only
where those are equal, a wrong scale is a difference of its own."""


@dataclass(frozen=True)
class Location:
    """Identifies a tensor of one step, on any rank: by step, phase, layer, micro-batch and name."""

    step: int
    phase: StepPhase
    layer: int | None = None
    """Index in the model; of a message the layer that computed it (forward), or whose backward takes it."""
    microbatch: int | None = None
    """Index in the global batch: data-parallel rank · micro-batches + the rank's own micro-batch."""
    name: str = ""
    """Name of a parameter, of a tensor of its optimizer state, or of an operand in float8."""
    tensor: int = 0
    """Index among several tensors between two layers."""
    evaluating: bool = False
    """Whether it belongs to the evaluation that follows the last step but those after loading."""

    def order(self, layers: int) -> tuple[int, bool, int, int, int, int, str]:
        """Return a key by which locations are sorted, causes before consequences, in a model of `layers`."""
        layer = -1 if self.layer is None else self.layer
        microbatch = -1 if self.microbatch is None else self.microbatch
        if self.phase is StepPhase.LOAD:
            location = (-1, 0)  # before all layers
        elif self.phase in FORWARD:
            # A message holds the output of the layer before. Without a layer: before all layers; without a
            # micro-batch (as a layer's parameters): before all micro-batches of the layer.
            location = (0, 4 * layer + WITHIN_LAYER.get(self.phase, 1) - 4 * (self.layer is None))
        elif self.phase in BACKWARD:
            # Layers last to first; a message precedes the layer's own backward.
            location = (PHASES.index(BACKWARD[0]), 5 * (layers - layer) + BACKWARD.index(self.phase))
        else:
            location = (PHASES.index(self.phase), 0)
        return self.step, self.evaluating, *location, microbatch, self.tensor, self.name


class RecordKey(NamedTuple):
    """Identifies a recorded tensor within a step or micro-batch: by kind, layer and name."""

    kind: str
    """`output`, `gradient` (of that output), `logits` (of a last layer whose output is features),
    `contribution` (to a parameter's gradient), `total` (the summed loss), `inside` (see `ModuleSketches`),
    `routing` (the experts of each token) with its `margin`, `choices` (how many tokens chose an expert), …"""
    layer: int = -1
    """The layer of an output or contribution; -1: the batch, or the step."""
    name: str = ""


SCALE = "float8 scale"
"""The kind of a scale of an operand in float8, by `path|operand` of a linear."""
Records = dict[RecordKey, Tensor]
"""The tensors of one scope."""
PARAMETER_KINDS = ("contribution", "final", "clipped", "value", "state")
"""Kinds whose name is a parameter's; a state's is `parameter/entry`."""


WHOLE_STEP = -1
"""Value of `RecordScope.microbatch` for the step as a whole."""


class RecordScope(NamedTuple):
    """What a recorded tensor belongs to: a micro-batch (of the global batch) in a step, or the whole step."""

    step: int
    microbatch: int = WHOLE_STEP
    evaluated: bool = False
    """Whether it belongs to the evaluation before the step, not to the step."""
