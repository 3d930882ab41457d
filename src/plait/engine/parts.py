"""The parts of an engine, as `parallelize` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from plait.autograd.dropout import DropoutGenerator
from plait.comm.mesh import Mesh
from plait.layout import Layout
from plait.pipeline.worker import Worker
from plait.plan import Plan
from plait.schedules.program import Instruction
from plait.schedules.step_programs import StepPrograms
from plait.sharding.gatherer import Gatherer
from plait.sharding.reducer import Reducer
from plait.tensor.losses import Loss
from plait.tensor.meta_layers import MetaLayers
from plait.tensor.sequence_dims import SequenceDims
from plait.tensor.vocabulary import Vocabulary


@dataclass(frozen=True)
class Parts:
    """See above."""

    plan: Plan
    mesh: Mesh
    loss: Loss
    counts: tuple[int, ...]
    """Layers per stage."""
    layouts: Mapping[str, Layout]
    """Of what the optimizer updates of every parameter of the model, by name."""
    whole_layouts: Mapping[str, Layout]
    """Of what layers use."""
    summed: Mapping[str, int]
    """Over how many neighbours along `tp` the gradient of each parameter is summed."""
    sequence_dims: Sequence[SequenceDims]
    """How the sequence flows through each layer of the model."""
    meta_layers: MetaLayers
    """All layers of the model, on the meta device."""
    steps: StepPrograms
    worker: Worker
    gatherer: Gatherer
    reducer: Reducer
    dropout: DropoutGenerator
    """What the dropouts of this rank draw by."""
    counted: Collection[str]
    """The parameters whose gradients count as this rank's in a norm over the model."""
    vocabulary: Vocabulary | None
    """What the model's logits are pieces of, where they are cut over `tp`."""
    in_half: bool
    """Whether gradients may overflow: something is computed, or travels, in fp16."""
    context: int | None
    """The longest sequence that the model takes, if it says so."""


Observer = Callable[[Instruction, Parts], None]
"""Told of each instruction of a step after it was carried out; the parts say what it gave."""
