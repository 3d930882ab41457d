"""The tensors that a rank holds, of model and optimizer, as shards of global tensors, and who saves which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.optimizer_state import state_of, whole_state_of
from plait.errors import CheckpointError
from plait.plan.axes import layout_degrees
from plait.plan.layout.layout import Layout
from plait.plan.shard_plan import ShardPlan, replica_ranks
from plait.ranks.mesh import Mesh


class Checkpointable(Protocol):
    """The interface of an engine that `save` and `load` use."""

    mesh: Mesh
    run_state: Mapping[str, Any]

    @property
    def shard_plan(self) -> ShardPlan:
        """The distribution of parameters and buffers over ranks, with all names of shared parameters."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError if the optimizer's update of a parameter depends on parameters of another rank."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and this rank's shard of each parameter of the rank's stages."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each saved buffer of this rank's stages; buffers are not sharded."""


def require_engine(engine: object) -> None:
    """Raise CheckpointError for an object that is no engine, such as its model."""
    if not hasattr(engine, "shard_plan") or not hasattr(engine, "mesh"):
        raise CheckpointError(
            f"the engine is an object of {type(engine).__name__}: give what plait.parallelize returns."
        )


@dataclass(frozen=True)
class RankShard:
    """A rank's shard of a global tensor, and all ranks that hold the same one."""

    name: str
    layout: Layout
    shard: Tensor
    ranks: tuple[int, ...]
    """All ranks that hold the same shard."""


def parameter_key(name: str) -> str:
    """Return the key of a parameter or buffer in a checkpoint."""
    return f"model.{name}"


def state_key(name: str, key: str = "") -> str:
    """Return the checkpoint's key for the entry `key` of a parameter's optimizer state."""
    return f"optim.state.{name}.{key}"


def state_keys(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return, by parameter name, the optimizer state entries (such as `exp_avg`) among the keys `tensors`."""
    prefix = "optim.state."
    found: dict[str, list[str]] = {}
    for full in tensors:
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def rank_contents(engine: Checkpointable, optimizers: OptimizerSet | None) -> Iterator[RankShard]:
    """Yield this rank's shards of the tensors to save; ranks that hold the same shards use the same order."""
    mesh, shard_plan = engine.mesh, engine.shard_plan

    def held(name: str, layout: Layout, shard: Tensor, stages: Iterable[int]) -> RankShard:
        return RankShard(name, layout, shard, replica_ranks(layout, mesh.coordinate, stages, mesh.sizes))

    for name, shard in engine.named_parameters():
        layout, stages = shard_plan.layouts[name], shard_plan.owners[name]
        yield held(parameter_key(name), layout, shard.detach(), stages)
        if optimizers is not None and (rank := optimizers.state_rank(shard)) is not None:
            for key, state_layout, tensor in whole_state_of(optimizers, name, shard, layout):
                yield RankShard(state_key(name, key), state_layout, tensor, (rank,))
        elif optimizers is not None:
            for key, (state_layout, tensor) in state_of(optimizers, name, shard, layout).items():
                yield held(state_key(name, key), state_layout, tensor.detach(), stages)
    for name, buffer in engine.named_buffers():
        layout = Layout(tuple(buffer.shape), layout_degrees(mesh.sizes))
        yield held(parameter_key(name), layout, buffer.detach().contiguous(), shard_plan.owners[name])


class WriterAssignment:
    """Assigns each shard to one of the ranks that hold it, so that they write equally many bytes.

    Needs no communication: all ranks that hold a shard assign the same shards in the same order before it.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def assign(self, ranks: tuple[int, ...], size: int) -> int:
        """Return which of `ranks` writes the next shard that they hold, of `size` bytes."""
        load = self._loads.setdefault(ranks, [0] * len(ranks))
        least = load.index(min(load))
        load[least] += size
        return ranks[least]


def written_by(shards: Iterable[RankShard], rank: int) -> Iterator[RankShard]:
    """Yield the shards that `rank` writes, out of those it holds; other holders write the rest."""
    writers = WriterAssignment()
    return (shard for shard in shards if writers.assign(shard.ranks, shard.shard.nbytes) == rank)
