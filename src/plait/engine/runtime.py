"""The objects that `parallelize` builds from a blueprint on one rank, for the engine to use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from plait.engine.blueprint import Blueprint
from plait.engine.pipeline.pipeline_rank import PipelineRank
from plait.engine.sharding.unit import Unit
from plait.models.layers.layer_sequence import saved_buffers
from plait.models.layers.model_validation import LateHooks
from plait.proof.meta_layers import MetaLayers
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import Instruction
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import DropoutGenerator
from plait.tensor.losses import Loss
from plait.tensor.parallel.partition import Vocabulary
from plait.tensor.running_sequence import ContextParallelism


@dataclass(frozen=True)
class Runtime:
    """One rank's objects, built by `parallelize`: the blueprint, and the rank's layers, units and groups."""

    blueprint: Blueprint
    """Without the values of the model; see `shared_blueprint`."""
    mesh: Mesh
    loss: Loss
    pipeline: PipelineRank
    units: Mapping[str, Unit]
    """Of this rank's layers, by name."""
    queue: WeightGradientQueue
    """The weight gradients of this rank's stages that are computed later."""
    context_parallelism: ContextParallelism
    """How sequences are divided over `cp`."""
    dropout: DropoutGenerator
    """The random numbers of this rank's dropouts."""
    counted: Collection[str]
    """The parameters whose gradients this rank adds to a norm over the model: each counts once."""
    vocabulary: Vocabulary | None
    """How the model's logits are partitioned over `tp`; None where they are whole."""
    meta_layers: MetaLayers
    """All layers of the model, on the meta device."""
    late_hooks: LateHooks
    """Of the model that was given, whose layers are copied."""
    context: int | None
    """The longest sequence that the model takes; None where it has no attribute `context`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank's optimizer updates, with their names in the model."""
        for unit in self.units.values():
            yield from unit.shard_parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's buffers that are in the model's `state_dict`, with their names there."""
        for stage in self.pipeline.stages.values():
            yield from saved_buffers(stage.layers)


InstructionObserver = Callable[[Instruction, Runtime], None]
"""Called after each instruction of a step; the runtime holds what it computed."""
