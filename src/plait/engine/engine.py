"""The engine: one training run's step, as a user calls it. Each call is a program that the executor runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.agreement import agree
from plait.comm.collectives import all_reduce, broadcast
from plait.comm.mesh import Mesh
from plait.comm.traffic import Counts
from plait.errors import DataError, NonFiniteError, PlanError
from plait.layout import Layout
from plait.pipeline.boundary import LayerInfo, infer
from plait.pipeline.executor import Executor
from plait.pipeline.fingerprint import fingerprint_of_tokens
from plait.pipeline.loss_scale import loss_scale
from plait.pipeline.modes import evaluating
from plait.pipeline.precision import DTYPES
from plait.pipeline.sequence import NamedLayer
from plait.pipeline.values import Value, map_tensors, signature, split
from plait.pipeline.worker import Worker
from plait.plan import Plan
from plait.schedules.program import Instruction, Program
from plait.schedules.schedule import Schedule
from plait.schedules.steps import Steps
from plait.sharding.elementwise import Guard
from plait.sharding.gatherer import Gatherer
from plait.sharding.norm import scale_to, total_norm
from plait.sharding.reducer import Reducer
from plait.sharding.replicas import check_replicas, held_by
from plait.tensor.losses import Loss
from plait.tensor.sampling import next_token, padded, require_prompt
from plait.tensor.vocabulary import Vocabulary

REMEMBERED_SHAPES = 8
"""Micro-batch shapes whose boundaries are remembered."""


@dataclass(frozen=True)
class Parts:
    """What `parallelize` puts together."""

    plan: Plan
    mesh: Mesh
    loss: Loss
    counts: tuple[int, ...]
    """Layers per stage."""
    layouts: Mapping[str, Layout]
    """Of what the optimizer updates of every parameter of the model, by name."""
    whole_layouts: Mapping[str, Layout]
    """Of what layers use."""
    skeleton: Sequence[NamedLayer]
    """All layers of the model, on the meta device."""
    prove: Callable[[Value], None] | None
    """Whether rules fit the model, proved for a micro-batch; None where nothing is cut."""
    steps: Steps
    worker: Worker
    gatherer: Gatherer
    reducer: Reducer
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


class Engine:
    """A model woven over a mesh. Made by `parallelize`; every method is called by every rank of the mesh."""

    def __init__(self, parts: Parts) -> None:
        self.plan = parts.plan
        self.mesh = parts.mesh
        self._parts = parts
        self._worker = parts.worker
        self._executor = Executor(
            parts.worker.handlers(), parts.gatherer.handlers(), parts.reducer.handlers()
        )
        cut = parts.plan.shards or parts.plan.tp > 1
        self._guard = Guard(self.parameters()) if cut else None
        self._scale = loss_scale(parts.plan.loss_scale, in_half=parts.in_half)
        self._infos: dict[Any, list[LayerInfo]] = {}
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._traffic_before = parts.mesh.traffic.snapshot()

    def forward_backward(self, inputs: Value, targets: Value, *, input_gradients: bool = False) -> Tensor:
        """One step's forward and backward; gradients are then final, and equal on all ranks that hold them.

        `inputs` and `targets` are this data-parallel rank's share of the global batch (ranks that differ in
        pp or tp pass the same): tensors, tuples or dictionaries whose dim 0 is the batch, cut into
        `plan.microbatches` micro-batches. Returns the mean loss over the global batch, 0-d, equal on every
        rank. Gradients add to those that are there; `zero_grad` starts anew. An exception leaves them as
        they were. Communication: the batch's shapes (256 bytes) over `pp`, and tokens over `tp`, boundary
        tensors over `pp`, what regions and the loss sum over `tp`, the loss's weight over `dp`, one
        reduction per unit, the loss over `world`.
        """
        self._traffic_before = self.mesh.traffic.snapshot()
        self._scale.begin(anew=self._parts.reducer.starts_anew)
        for stage in self._worker.stages.values():
            stage.input_gradients = input_gradients
        with torch.enable_grad():
            loss = self._run_with_loss(self._parts.steps.train, inputs, targets, input_gradients)
        self._scale.end()
        return loss

    def evaluate(self, inputs: Value, targets: Value) -> Tensor:
        """The mean loss over the global batch, without gradients and with layers in evaluation mode.

        Takes and returns what `forward_backward` does.
        """
        with torch.no_grad(), evaluating(self._modules()):
            return self._run_with_loss(self._parts.steps.evaluate, inputs, targets, input_gradients=False)

    def generate(
        self,
        prompt: Tensor,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Continue `prompt` `[rows, length]`: int64 `[rows, length + tokens]`, equal on every rank.

        The model has to be causal, and its output logits `[rows, length, vocab]`. It sees at most its
        context's last tokens. Communication: per token the boundary tensors, the token over `pp`, and, where
        the logits are cut, 16 bytes a row over `tp` (with `top_k` 8 · k more).
        """
        require_prompt(prompt, tokens, temperature, top_k)
        start = f"a prompt {tuple(prompt.shape)} of tokens {fingerprint_of_tokens(prompt.cpu())}"
        self._agree(f"{start}, {tokens} more at {temperature}, top_k {top_k}, seed {seed}", "model")
        generator = torch.Generator().manual_seed(seed)
        sequence = prompt.to(self.mesh.device)
        with torch.no_grad(), evaluating(self._modules()):
            for number in range(tokens):
                seen, length = padded(sequence, self._parts.context)
                self._run(self._parts.steps.output, [seen], [], None, input_gradients=False, anew=number == 0)
                token = torch.zeros(sequence.shape[0], dtype=torch.int64, device=self.mesh.device)
                if self._is_last:
                    logits = self._worker.loss_end.outputs[0][:, length - 1]
                    token = next_token(
                        logits,
                        temperature=temperature,
                        top_k=top_k,
                        generator=generator,
                        vocabulary=self._parts.vocabulary,
                    )
                broadcast(token, self.mesh.group("pp"), self._parts.steps.last_rank, checked=False).wait()
                sequence = torch.cat([sequence, token[:, None]], dim=1)
        return sequence

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients of the model so that their norm is at most `max_norm`; the norm before, 0-d.

        Over all axes, each parameter once; `norm_type` is the exponent, or `float("inf")`: the largest one.
        A norm that is not finite changes nothing; with `error_if_nonfinite` it raises `NonFiniteError` on
        every rank. With a loss scale gradients that are not finite are thrown away, so that the optimizer's
        next step does nothing, and a dynamic scale is halved; only then, or for the error, the host waits for
        the device. Communication: one all-reduce of 8 bytes over `pp` and `tp`, or over `world`
        where gradients are cut.
        """
        units = self._parts.reducer.units.values()
        group = self.mesh.group("world" if self.plan.shards else "model")
        norm = total_norm(units, self._parts.counted, group, self.mesh.device, norm_type)
        scale_to(units, norm, max_norm)
        if self._scale.guards or error_if_nonfinite:
            finite = bool(norm.isfinite())
            self._scale.update(finite=finite)
            if not finite and self._scale.guards:
                self._parts.reducer.drop()
            if not finite and error_if_nonfinite:
                raise NonFiniteError(
                    f"the gradient norm is {norm.item()} over all ranks: lower the learning rate, raise the "
                    "warm-up, or look at the data of that step."
                )
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the model, layer by layer.

        Their gradients belong to the step: hooks on parameters see some of them too early, or not at all.
        """
        for unit in self._parts.reducer.units.values():
            yield from unit.pieces.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimizer: matrices and tables decay; vectors (biases, norm scales) do not."""
        trainable: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                is_matrix = len(self.layouts[name].shape) >= 2  # a piece of one may be flat
                trainable[is_matrix].append(parameter)
        return [
            {"params": trainable[True], "weight_decay": weight_decay},
            {"params": trainable[False], "weight_decay": 0.0},
        ]

    def check_replicas(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise `ReplicaError` on every rank where ranks that must hold the same bits of a parameter do not.

        With an `optimizer` its state of each parameter counts too. Communication: 8 bytes a parameter of the
        model over `dp`, `tp` and (if some are tied across stages) `pp`, 2 bytes a parameter over `world`.
        """
        units = self._parts.reducer.units.values()
        check_replicas(held_by(units, self.layouts, self._parts.steps, self.mesh), optimizer)

    def microbatch_losses(self) -> Tensor:
        """The mean loss of each of this data-parallel rank's last micro-batches, `[microbatches]`.

        Communication: one broadcast over `pp`.
        """
        if not self._weights:
            raise DataError("there are no losses yet: call forward_backward or evaluate first.")
        losses = torch.zeros(len(self._weights), dtype=torch.float64, device=self.mesh.device)
        if self._is_last:
            losses = torch.stack(self._totals).double() / torch.stack(self._weights)
        return broadcast(losses, self.mesh.group("pp"), self._parts.steps.last_rank, checked=False).wait()

    def input_gradients(self) -> Value | None:
        """The gradient of the last step's inputs, if asked for; shaped like them, None for whole numbers.

        Only the ranks of the first stage have it; the others get None.
        """
        pieces = self._worker.input_gradients
        if not pieces:
            return None
        columns = [[pieces[m][i] for m in sorted(pieces)] for i in range(len(pieces[0]))]
        whole = iter([None if column[0] is None else torch.cat(column) for column in columns])  # type: ignore[arg-type]
        return map_tensors(lambda _: next(whole), self._worker.batch[0])

    def observe(self, observer: Observer | None) -> None:
        """Let `observer` see what each instruction of this rank's next steps gives; None: nobody any more."""
        parts = self._parts
        self._executor.observer = (
            None if observer is None else lambda instruction: observer(instruction, parts)
        )

    @property
    def schedule(self) -> Schedule:
        """The order of a training step, and which rank of `pp` each stage lives on."""
        return self._parts.steps.schedule

    @property
    def loss_scale(self) -> float:
        """What the next step's loss is multiplied by; 1 where there is no scale."""
        return self._scale.value

    @property
    def adapts_loss_scale(self) -> bool:
        """Whether a step whose gradients overflow lowers the scale of the next one."""
        return self._scale.dynamic

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """For every parameter of the model, by name: which piece of it each rank of its stage updates."""
        return self._parts.layouts

    def traffic(self) -> Counts:
        """This rank's bytes and calls since the last `forward_backward` began: `{axis: {kind: Count}}`."""
        return self.mesh.traffic.since(self._traffic_before)

    @property
    def _is_last(self) -> bool:
        return self.mesh.index("pp") == self._parts.steps.last_rank

    def _modules(self) -> list[nn.Module]:
        return [layer.module for stage in self._worker.stages.values() for layer in stage.layers]

    def _run_with_loss(
        self, program: Program, inputs: Value, targets: Value, input_gradients: bool
    ) -> Tensor:
        count = self.plan.microbatches
        batch = split(map_tensors(self._as_input, inputs), count, "inputs")
        parts = split(map_tensors(self._as_target, targets), count, "targets")
        looks = f"a step on micro-batches of {signature(batch[0])} with targets {signature(parts[0])}"
        self._agree(looks, "pp")
        self._agree(f"{looks}, tokens {fingerprint_of_tokens(batch, parts)}", "tp")
        weights = [self._parts.loss.weight(part) for part in parts]
        self._weights = [torch.as_tensor(w, dtype=torch.float64, device=self.mesh.device) for w in weights]
        weight = torch.stack(self._weights).sum()
        weight = all_reduce(weight, self.mesh.group("dp"), checked=False).wait()
        self._run(program, batch, parts, self._scale.value / weight, input_gradients)
        mean = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self._is_last:
            self._totals = self._worker.loss_end.totals
        if self._is_last and self.mesh.index("tp") == 0:
            mean = torch.stack(self._totals).double().sum() / weight
        return all_reduce(mean, self.mesh.group("world"), checked=False).wait()

    def _agree(self, doing: str, axis: str) -> None:
        """Before it: the ranks along `axis` must be about to do the same.

        Communication: one all-gather of 256 bytes over `axis`, on the CPU, so that no device is waited for.
        """
        group = self.mesh.group(axis)
        if group.process_group is not None and group.uses_gloo:
            agree(doing, group, torch.device("cpu"))

    def _as_input(self, tensor: Tensor) -> Tensor:
        """In the plan's precision, if floating-point; on the device where the first stage reads it."""
        dtype = DTYPES[self.plan.precision] if tensor.is_floating_point() else None
        first = self.mesh.index("pp") == self._parts.steps.first_rank
        return tensor.to(self.mesh.device if first else tensor.device, dtype)

    def _as_target(self, tensor: Tensor) -> Tensor:
        """On the device where the last stage reads it."""
        return tensor.to(self.mesh.device) if self._is_last else tensor

    def _run(
        self,
        program: Program,
        batch: Sequence[Value],
        targets: Sequence[Value],
        scale: Tensor | None,
        input_gradients: bool,
        anew: bool = True,
    ) -> None:
        """Carry out a program. `anew`: the optimizer may have been at work since the last one."""
        if torch.is_autocast_enabled(self.mesh.device.type):
            raise PlanError("torch.autocast is active around a step: leave it, and set plan.precision.")
        if torch.is_inference_mode_enabled():
            raise PlanError("torch.inference_mode is active around a step: leave it, or use torch.no_grad.")
        self._worker.begin(batch, self._layer_infos(batch[0], input_gradients), self._parts.counts)
        self._worker.loss_end.begin(targets, scale)
        trains = torch.is_grad_enabled()
        try:
            if trains:
                self._parts.reducer.begin(self._scale.value)
            if anew:
                self._parts.gatherer.begin()
            self._executor.run(program)
        except BaseException:
            self._worker.clear()
            self._parts.gatherer.clear()
            if trains:
                self._parts.reducer.clear()
            raise

    def _layer_infos(self, microbatch: Value, input_gradients: bool) -> list[LayerInfo]:
        trains = torch.is_grad_enabled()
        key = (signature(microbatch), input_gradients, trains)
        known = self._infos.pop(key, None)
        if known is None:
            skeleton = self._parts.skeleton
            with nullcontext() if trains else evaluating(layer.module for layer in skeleton):
                known = infer(
                    skeleton,
                    microbatch,
                    input_gradients=input_gradients,
                    circumstances=f"with plan.tp = {self.plan.tp}, " if self.plan.tp > 1 else "",
                )
            if self._parts.prove is not None:
                self._parts.prove(microbatch)
        self._infos[key] = known  # the latest used stands last
        if len(self._infos) > REMEMBERED_SHAPES:
            del self._infos[next(iter(self._infos))]
        return known
