"""`RankReport`: what each rank sends to all others before a reshard: its old rank, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.optimizer_state import describe, state_of
from plait.checkpoint.rank_contents import parameter_key, state_key
from plait.engine.engine import Engine
from plait.engine.runner import Runtime
from plait.plan.layout.layout import Layout
from plait.plan.plan import Plan
from plait.plan.rules import join


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of the old run on this rank: its shard of a global tensor, with the layout."""

    layout: Layout
    shard: Tensor


def gradient_key(name: str) -> str:
    """Return the key of a parameter's gradient in reports and transfers."""
    return f"gradient.{name}"


def held_tensors(runtime: Runtime, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, HeldTensor]]:
    """Yield by key what this rank holds: parameters, gradients that there are, optimizer state, buffers.

    Raises CheckpointError for optimizer state that no other layout can hold.
    """
    state = OptimizerSet(tuple(optimizers))
    for name, shard in runtime.named_parameters():
        layout = runtime.blueprint.layouts[name]
        yield parameter_key(name), HeldTensor(layout, shard.detach())
        if shard.grad is not None:
            yield gradient_key(name), HeldTensor(layout, shard.grad.detach())
        for key, (state_layout, tensor) in state_of(state, name, shard, layout).items():
            yield state_key(name, key), HeldTensor(state_layout, tensor.detach())
    for stage in runtime.pipeline.stages.values():
        for layer in stage.layers:
            for name, buffer in layer.module.named_buffers(remove_duplicate=False):
                whole = Layout(tuple(buffer.shape), {"world": 1})
                yield parameter_key(join(layer.path, name)), HeldTensor(whole, buffer.detach())


@dataclass(frozen=True)
class RankReport:
    """One rank's report for the others before a reshard, of JSON values except for the plan."""

    place: int | None = None
    """Its rank in the old mesh; None where it was not in it."""
    plan: Plan | None = None
    """The old one."""
    run_state: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    router_choices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The choices of experts by which the next step of the optimizer corrects biases, by router."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The global shape of each tensor that it holds, by key."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[Mapping[str, Any]] = ()
    """`describe` of each of its optimizers."""
    classes: Sequence[str] = ()
    """The class of each optimizer, also of those that a rank that joins will make."""

    @staticmethod
    def of(engine: Engine, optimizers: Sequence[Optimizer]) -> RankReport:
        """Return this rank's report, given its engine and optimizers of the old run."""
        names = {id(shard): name for name, shard in engine.named_parameters()}
        balance = engine.runtime.balance
        held = dict(held_tensors(engine.runtime, optimizers))
        return RankReport(
            engine.mesh.rank,
            engine.plan,
            engine.run_state,
            engine.runtime.dropout.seed,
            {} if balance is None else balance.uncorrected_choices(),
            {key: one.layout.shape for key, one in held.items()},
            {key: str(one.shard.dtype).removeprefix("torch.") for key, one in held.items()},
            [describe(OptimizerSet((one,)), names) for one in optimizers],
            [type(one).__name__ for one in optimizers],
        )

    def to_text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> RankReport:
        """Return the report that `to_text` wrote."""
        told = json.loads(text)
        if told["plan"] is not None:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in told["plan"].items()
            }
            told["plan"] = Plan(**values)
        return RankReport(**told)

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor that the rank holds."""
        dtype: torch.dtype = getattr(torch, self.dtypes[key])
        return dtype
