"""The runner of one rank: carries out a program on a batch, once all ranks mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plait.autograd.dropout import names_of
from plait.comm.collectives import all_reduce, broadcast
from plait.comm.consistency_check import require_same_text
from plait.engine.parts import Parts
from plait.errors import DataError, PlanError
from plait.layers.fingerprint import fingerprint_of_tokens
from plait.layers.nested import Microbatches, Value, cut, signature, signatures, tensors_of
from plait.layers.precision import DTYPES
from plait.layers.shape_inference import LayerInfo
from plait.pipeline.executor import Executor
from plait.pipeline.loss_scale import loss_scale
from plait.schedules.program import Program
from plait.tensor.torch_losses import divisor

REMEMBERED_SHAPES = 256
"""Micro-batch shapes whose boundaries are remembered, beside those of the step."""


class Runner:
    """What an engine's methods have in common."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.plan, self.mesh, self.worker = parts.plan, parts.mesh, parts.worker
        self.steps = parts.steps
        """The programs; another order of the same actions may take their place."""
        self.executor = Executor(parts.worker.handlers(), parts.gatherer.handlers(), parts.reducer.handlers())
        self.scale = loss_scale(parts.plan.loss_scale, in_half=parts.in_half)
        self.given_cut = False
        """Whether the latest batch came as `Microbatches`."""
        self._drops = any(names_of(layer.module) for layer in parts.meta_layers.layers)
        self._infos: dict[Any, list[LayerInfo]] = {}
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []

    @property
    def is_last(self) -> bool:
        """Whether the last stage lives on this rank."""
        return self.mesh.index("pp") == self.steps.last_rank

    @property
    def modules(self) -> list[nn.Module]:
        """The layers of this rank."""
        return [layer.module for stage in self.worker.stages.values() for layer in stage.layers]

    def run_with_loss(
        self, program: Program, inputs: Value, targets: Value, *, input_gradients: bool
    ) -> Tensor:
        """Cut the batch, carry out a program that ends in the loss; its mean over the global batch, 0-d."""
        self.given_cut = isinstance(inputs, Microbatches)
        batch, parts = cut(inputs, targets, self.plan.microbatches, (self.as_input, self._as_target))
        looks = f"a step on micro-batches of {signatures(batch)} with targets {signatures(parts)}"
        self.agree(looks, "pp")
        self.agree(f"{looks}, tokens {fingerprint_of_tokens(batch, parts)}", "tp")
        if self._drops and torch.is_grad_enabled():
            self.parts.dropout.rows = self._rows(batch)
        weights = [self.parts.loss.weight(part) for part in parts]
        self._weights = [torch.as_tensor(w, dtype=torch.float64, device=self.mesh.device) for w in weights]
        weight = torch.stack(self._weights).sum()
        weight = all_reduce(weight, self.mesh.group("dp"), checked=False).about("the loss's weight").wait()
        weight = divisor(self.parts.loss, weight)
        self.run(program, batch, parts, self.scale.value / weight, input_gradients=input_gradients)
        mean = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.is_last:
            self._totals = self.worker.loss_end.totals
        if self.is_last and self.mesh.index("tp") == 0:
            mean = torch.stack(self._totals).double().sum() / weight
        return all_reduce(mean, self.mesh.group("world"), checked=False).about("the mean loss").wait()

    def _rows(self, batch: Sequence[Value]) -> list[range]:
        """Which rows of the global batch each micro-batch has, by the first of its tensors.

        Communication: one all-reduce over `dp`, whose ranks may have different numbers of rows; on the CPU
        where the group has a way there, so that no device is waited for.
        """
        counts = [next((len(one) if one.dim() else 1 for one in tensors_of(value)), 1) for value in batch]
        group, before = self.mesh.group("dp"), 0
        if group.size > 1:
            device = group.device_for_text(self.mesh.device)
            shares = torch.zeros(group.size, dtype=torch.int64, device=device)
            shares[self.mesh.index("dp")] = sum(counts)
            every = all_reduce(shares, group, checked=False).about("the batch's rows").wait()
            before = int(every[: self.mesh.index("dp")].sum())
        return [range(*ends) for ends in pairwise(accumulate(counts, initial=before))]

    def microbatch_losses(self) -> Tensor:
        """The mean loss of each of the last micro-batches, `[microbatches]`. Communication: one broadcast."""
        if not self._weights:
            raise DataError("there are no losses yet: call forward_backward or evaluate first.")
        losses = torch.zeros(len(self._weights), dtype=torch.float64, device=self.mesh.device)
        if self.is_last:
            weights = divisor(self.parts.loss, torch.stack(self._weights))
            losses = torch.stack(self._totals).double() / weights
        return broadcast(losses, self.mesh.group("pp"), self.steps.last_rank, checked=False).wait()

    def agree(self, doing: str, axis: str) -> None:
        """Before it: the ranks along `axis` must be about to do the same.

        Communication: one all-gather of 256 bytes over `axis`, on the CPU, so that no device is waited for.
        """
        group = self.mesh.group(axis)
        if group.device_for_text(self.mesh.device).type == "cpu":
            require_same_text(doing, group, torch.device("cpu"))

    def as_input(self, tensor: Tensor) -> Tensor:
        """In the plan's precision, if floating-point; on the device where the first stage reads it."""
        dtype = DTYPES[self.plan.precision] if tensor.is_floating_point() else None
        first = self.mesh.index("pp") == self.steps.first_rank
        return tensor.to(self.mesh.device if first else tensor.device, dtype)

    def _as_target(self, tensor: Tensor) -> Tensor:
        """On the device where the last stage reads it."""
        return tensor.to(self.mesh.device) if self.is_last else tensor

    def run(
        self,
        program: Program,
        batch: Sequence[Value],
        targets: Sequence[Value],
        scale: Tensor | None,
        *,
        input_gradients: bool,
        anew: bool = True,
    ) -> None:
        """Carry out a program. `anew`: the optimizer may have been at work since the last one."""
        if torch.is_autocast_enabled(self.mesh.device.type):
            raise PlanError("torch.autocast is active around a step: leave it, and set plan.precision.")
        if torch.is_inference_mode_enabled():
            raise PlanError("torch.inference_mode is active around a step: leave it, or use torch.no_grad.")
        self.worker.begin(batch, self._layer_infos(batch, input_gradients), self.parts.counts)
        self.worker.loss_end.begin(targets, scale)
        trains = torch.is_grad_enabled()
        try:
            if trains:
                self.parts.reducer.begin(self.scale.value)
            if anew:
                self.parts.gatherer.begin()
            self.executor.run(program)
        except BaseException:
            self.worker.clear()
            self.parts.gatherer.clear()
            if trains:
                self.parts.reducer.clear()
            raise

    def _layer_infos(self, batch: Sequence[Value], input_gradients: bool) -> list[list[LayerInfo]]:
        """Of each micro-batch, those of all layers. Those of shapes that were met before are remembered."""
        trains = torch.is_grad_enabled()
        keys = [(signature(one), input_gradients, trains) for one in batch]
        for key, one in zip(keys, batch, strict=True):
            known = self._infos.pop(key, None)
            self._infos[key] = self._infer(one, input_gradients) if known is None else known
        infos = [self._infos[key] for key in keys]
        while len(self._infos) > REMEMBERED_SHAPES + len(set(keys)):
            del self._infos[next(iter(self._infos))]  # the latest used stand last
        return infos

    def _infer(self, microbatch: Value, input_gradients: bool) -> list[LayerInfo]:
        layers = self.parts.meta_layers
        infos = layers.infer(microbatch, input_gradients=input_gradients)
        looks = signature(microbatch)
        if layers.are_proved and all(known != looks for known, *_ in self._infos):
            layers.prove(microbatch)
        return infos
