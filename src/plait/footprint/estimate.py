"""`memory`: predicts the memory of each rank of a plan, without ranks and without allocating the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from plait.blueprint import Blueprint, build_blueprint
from plait.errors import PlanError
from plait.footprint.layer_traces import ModelTraces, as_input, trace_model
from plait.footprint.memory_report import Memory, RankMemory
from plait.footprint.simulated_step import MemoryObserver, simulate_step
from plait.layers.nested import Value, map_tensors, signature, split, tensors_of
from plait.layers.precision import DTYPES
from plait.plan import Plan
from plait.rules import Rules
from plait.schedules.lower import lower
from plait.schedules.schedule import Schedule
from plait.schedules.stage_cuts.schedule_and_cut import StageCut, schedule_and_cut
from plait.tensor.losses import Loss, cross_entropy
from plait.tensor.torch_losses import GivenLoss, as_loss


def memory(
    model: nn.Module,
    plan: Plan,
    inputs: Value = None,
    targets: Value = None,
    *,
    loss: GivenLoss = cross_entropy,
    rules: Rules | None = None,
    rows: int | None = None,
    moments: int = 2,
    device: torch.device | str | None = None,
) -> Memory:
    """Return the bytes that each rank of `plan` would allocate for `model`, during a step and between steps.

    `inputs` and `targets` are one data-parallel rank's share of a batch, as `Engine.forward_backward` takes
    it; tensors on meta will do. Without `inputs`, a model that has a `context`, as plait's own have, is
    assumed to get `rows` full sequences of tokens (default: one a micro-batch); for other models no
    activations are counted. Without `targets` there is a class for each row of the output. `moments`: how
    many tensors of a parameter's size the optimizer keeps for it: 2 for AdamW, 1 for SGD with momentum.
    `device` is where layers run, by default CUDA where that is available.

    Layers run once, on the meta device, and ranks do not communicate. Not counted: temporaries of the
    optimizer's step, memory of communication backends, and fragmentation. Gradients of an earlier step are
    gone, as after `zero_grad()`. A loss that does not run on meta is assumed to copy its input; attention
    inside `nn.MultiheadAttention` counts with its matrix of weights, and recurrent layers as PyTorch composes
    them. Raises PlanError, ModelError, DataError
    or ScheduleError, as `parallelize` and the first step would.
    """
    return MemoryEstimator(model, inputs, targets, as_loss(loss), rules, rows, moments, device).estimate(plan)


@dataclass
class MemoryEstimator:
    """The arguments of `memory` without the plan: predicts the memory of several plans.

    Plans that share schedules or the shapes of layers share their simulation.
    """

    model: nn.Module
    inputs: Value = None
    targets: Value = None
    loss: Loss = cross_entropy
    rules: Rules | None = None
    rows: int | None = None
    moments: int = 2
    device: torch.device | str | None = None
    traces: dict[Any, ModelTraces] = field(default_factory=dict)
    order_of: Callable[..., tuple[Schedule, StageCut]] = field(
        default_factory=lambda: cache(schedule_and_cut)
    )

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("moments", 0)):
            value = getattr(self, name)
            counts = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not counts and (name, value) != ("rows", None):
                raise PlanError(f"{name} is {value!r}: give a whole number of at least {least}.")
        if self.rows is not None and self.inputs is not None:
            raise PlanError(f"inputs have rows of their own: give them, or rows = {self.rows}, not both.")

    def estimate(self, plan: Plan) -> Memory:
        """Return the predicted memory of a plan."""
        whole = replace(plan, strategy="none", offload="none", reduce="last")
        unsharded = max(rank.peak for rank in self.ranks(whole))
        return Memory(plan, self.ranks(plan), unsharded, has_activations=self._batch(plan) is not None)

    def ranks(self, plan: Plan, observer: MemoryObserver | None = None) -> tuple[RankMemory, ...]:
        """Return the memory of each rank of `pp`; `observer` is called after each instruction of the step."""
        blueprint = build_blueprint(self.model, plan, self.rules, self.order_of)
        traces = self._traces(blueprint)
        return tuple(
            simulate_step(blueprint, rank, program, traces, self.where, self.moments, observer)
            for rank, program in enumerate(lower(blueprint.schedule, blueprint.lowering_spec))
        )

    def rows_of(self, plan: Plan) -> int | None:
        """Return the batch size per data-parallel rank, or None if the estimator was given no batch."""
        batch = self._batch(plan)
        return None if batch is None else next(tensors_of(batch)).shape[0]

    @property
    def where(self) -> torch.device:
        """The device that the layers would run on."""
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _batch(self, plan: Plan) -> Value:
        """Return the inputs on the meta device, or None where their shape is unknown."""
        if self.inputs is not None:
            return map_tensors(lambda tensor: as_input(tensor, DTYPES[plan.precision]), self.inputs)
        context = getattr(self.model, "context", None)
        if context is None:
            return None
        rows = plan.microbatches if self.rows is None else self.rows
        return torch.empty(rows, context, dtype=torch.int64, device="meta")

    def _traces(self, blueprint: Blueprint) -> ModelTraces | None:
        plan, batch = blueprint.plan, self._batch(blueprint.plan)
        if batch is None:
            return None
        microbatch = split(batch, plan.microbatches, "inputs")[0]
        precisions = plan.precision, plan.master_precision, plan.gradient_precision
        late = blueprint.lowering_spec.sharding.scatters == "each"
        key = plan.tp, plan.sequence_parallel, signature(microbatch), precisions, late, blueprint.recompute
        if key not in self.traces:
            targets = None
            if self.targets is not None:
                targets = split(self.targets, plan.microbatches, "targets")[0]
            self.traces[key] = trace_model(blueprint, microbatch, targets, self.loss)
        return self.traces[key]
