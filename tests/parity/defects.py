"""Plait, broken on purpose in one place: each defect lasts while it is entered, in one rank's process.

They show that the parity tests can fail, and that they see mistakes of each part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import runner
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.pipeline.stage import Stage
from plait.engine.pipeline.stage_exchange import Exchange
from plait.engine.sharding import gradient_norm, reducer
from plait.engine.sharding.reducer import Reducer
from plait.ranks.collectives import all_reduce
from plait.ranks.handle import Handle


@contextmanager
def weight_work_twice() -> Iterator[None]:
    """Every deferred weight gradient counts double."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int, layer: int) -> None:
        self.work[microbatch, layer] *= 2
        original(self, microbatch, layer)

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


@contextmanager
def weight_work_of_another_microbatch() -> Iterator[None]:
    """`W` of every micro-batch repeats that of the first."""
    original = Stage.backward_weight
    first: dict[tuple[int, int], list[Any]] = {}

    def backward_weight(self: Stage, microbatch: int, layer: int) -> None:
        key = microbatch, layer
        self.work[key] = first.setdefault((self.number, layer), self.work[key])
        original(self, microbatch, layer)

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


@contextmanager
def tie_not_reduced() -> Iterator[None]:
    """A parameter on two stages keeps each stage's own part of its gradient."""
    original = Reducer.reduce

    def reduce(self: Reducer, name: str) -> None:
        if all(
            buffer.replica_group is None or buffer.replica_group.name != "tie"
            for buffer in self.units[name].buffers
        ):
            original(self, name)

    with patch.object(Reducer, "reduce", reduce):
        yield


@contextmanager
def mean_over_data_ranks() -> Iterator[None]:
    """Gradients are averaged, although the loss was divided by the global weight already."""

    def mean(tensor: Tensor, group: Any, **options: Any) -> Handle[Tensor]:
        return all_reduce(tensor, group, "mean", **options)

    with patch.object(reducer, "all_reduce", mean):
        yield


@contextmanager
def loss_divided_by_own_weight() -> Iterator[None]:
    """Each data-parallel rank divides by what it counted itself, times the number of ranks."""

    def local(tensor: Tensor, group: Any, **options: Any) -> Handle[Tensor]:
        if group.name == "dp":
            return Handle.done(tensor * group.size, group)
        return all_reduce(tensor, group, **options)

    with patch.object(runner, "all_reduce", local):
        yield


@contextmanager
def no_gradient_over_boundary() -> Iterator[None]:
    """Stages send zeros backward."""
    original = Exchange.send_gradients

    def send_gradients(self: Exchange, action: Any, gradients: list[Tensor | None], peer: int) -> None:
        original(self, action, [None for _ in gradients], peer)

    with patch.object(Exchange, "send_gradients", send_gradients):
        yield


@contextmanager
def buffers_given_back_too_soon() -> Iterator[None]:
    """A receive buffer is filled anew while its micro-batch is in flight."""
    original = Exchange.take

    def take(self: Exchange, action: Any) -> list[Tensor]:
        buffers = original(self, action)
        self.release(action.stage, action.microbatch)
        return buffers

    with patch.object(Exchange, "take", take):
        yield


@contextmanager
def gradients_of_the_step_before_stay() -> Iterator[None]:
    """The flat gradients are not set to zero when a step begins."""
    original = Reducer._started

    def started(self: Reducer, name: str) -> list[Tensor]:
        rest = original(self, name)
        if not self.units[name].keeps_gradients:
            return rest
        self._queue.unwritten.clear()  # nor written first
        return []

    with patch.object(Reducer, "_started", started):
        yield


@contextmanager
def norm_of_own_stage_only() -> Iterator[None]:
    """Each rank of `pp` clips by the norm of its own gradients."""

    def local(tensor: Tensor, group: Any, *op: str, **options: Any) -> Handle[Tensor]:
        return Handle.done(tensor, group)

    with patch.object(gradient_norm, "all_reduce", local):
        yield


@contextmanager
def targets_of_another_microbatch() -> Iterator[None]:
    """The loss compares each output with the first micro-batch's targets."""
    original = LossStage.begin

    def begin(self: LossStage, targets: Any, scale: Tensor | None) -> None:
        original(self, [targets[0] for _ in targets], scale)

    with patch.object(LossStage, "begin", begin):
        yield


@contextmanager
def rounded_to_single_precision() -> Iterator[None]:
    """One message backward loses half of its digits: far too little to see in a curve of losses."""
    original = Exchange.send_gradients

    def send_gradients(self: Exchange, action: Any, gradients: list[Tensor | None], peer: int) -> None:
        rounded = [None if g is None else g.to(torch.float32).to(g.dtype) for g in gradients]
        original(self, action, rounded if action.microbatch == 0 else gradients, peer)

    with patch.object(Exchange, "send_gradients", send_gradients):
        yield


DEFECTS = {
    weight_work_twice: "the gradient of",
    weight_work_of_another_microbatch: "the gradient of",
    tie_not_reduced: "another gradient of embedding.token.weight",
    mean_over_data_ranks: "the gradient of",
    loss_divided_by_own_weight: "the gradient of",
    no_gradient_over_boundary: "the gradient of",
    buffers_given_back_too_soon: "the gradient of",
    gradients_of_the_step_before_stay: "another gradient of embedding.token.weight",
    norm_of_own_stage_only: "another norm",
    targets_of_another_microbatch: "the gradient of",
    rounded_to_single_precision: "the gradient of",
}
"""Each defect, and what the check has to say about it."""
