"""The runner of one rank: checks that all ranks run the same step, and runs its program.

`Runtime` has what `parallelize` builds on the rank for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.action_times import ActionTimes, clock_for
from plait.engine.blueprint import Blueprint
from plait.engine.cuda_graphs.address_check import FixedAddresses
from plait.engine.cuda_graphs.graph_recorder import CudaGraphRecorder, GraphRecorder
from plait.engine.cuda_graphs.segment_graphs import SegmentGraphs
from plait.engine.fingerprint import fingerprint_of_tokens
from plait.engine.local_batch import (
    LocalInputs,
    SequencePart,
    cut,
    joined,
    local_inputs,
    map_inputs,
    without_part,
)
from plait.engine.pipeline.executor import Executor, RunCalls
from plait.engine.pipeline.pipeline_rank import PipelineRank
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.gradient_norm import non_finite_gradients
from plait.engine.sharding.loss_scale import loss_scale
from plait.engine.sharding.reducer import Reducer
from plait.engine.sharding.unit import Unit
from plait.engine.step_recorder import Recorder
from plait.errors import DataError, PlanError
from plait.models.layers.layer_sequence import saved_buffers
from plait.models.layers.model_validation import LateHooks
from plait.models.layers.shape_inference import LayerInfo
from plait.plan.rules import Rules
from plait.proof.layer_runs_on_meta import MetaLayers
from plait.ranks.accelerator import is_accelerator, sent
from plait.ranks.collectives import all_reduce, broadcast
from plait.ranks.consistency_check import SAME_CALL, require_same_text
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import INSTRUCTION_TYPES, Instruction, Program, Segment
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import DropoutGenerator, names_of
from plait.tensor.dtypes import DTYPES
from plait.tensor.experts.router_losses_of_step import StepBalance
from plait.tensor.experts.token_documents import TokenDocuments
from plait.tensor.losses import Loss
from plait.tensor.microbatches import Microbatches, counted_microbatches, split_both
from plait.tensor.nested_values import Value, map_tensors, signature, signatures, tensors_of, with_tensors
from plait.tensor.parallel.partition import Vocabulary
from plait.tensor.running_sequence import ContextParallelism, LocalSequence, running
from plait.tensor.torch_losses import divisor

REMEMBERED_SHAPES = 256
"""Micro-batch shapes whose boundaries are remembered, beside those of the step."""
COMPARED_BATCHES = 2
"""How many batches are compared whole, with tensors that have fractions or are on a GPU."""


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
    balance: StepBalance | None
    """The losses of routers and the load of experts; None for a model without routers."""
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
    rules: Rules | None
    """The rules of tensor parallelism that were given, or the model's own; None where there are none."""

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


@dataclass(frozen=True)
class LossBatch:
    """A batch split into micro-batches, with the weights by which their losses are averaged."""

    inputs: LocalInputs
    targets: Sequence[Value]
    counted: int
    """How many micro-batches count, from the first on; the others are there because each step has as many."""
    weights: Tensor
    """The loss's weight of each micro-batch, `[microbatches]`; 0 for those that do not count."""
    total_weight: Tensor
    """The loss's weight of the global batch, 0-d."""
    divisor: Tensor
    """What the summed loss of the global batch is divided by, 0-d."""
    documents: Sequence[TokenDocuments]
    """Of each micro-batch's tokens, in training and where the model has routers; else empty."""
    token_total: Tensor
    """The number of tokens of the global batch in documents, without padding, 0-d."""


class Runner:
    """Runs the steps of an engine: batch, program (instructions) and loss; users call `Engine` instead."""

    def __init__(self, runtime: Runtime) -> None:
        blueprint = runtime.blueprint
        self.runtime = runtime
        self.plan, self.mesh, self.pipeline = blueprint.plan, runtime.mesh, runtime.pipeline
        self.steps = blueprint.programs.posting_late() if self.mesh.uses_nccl else blueprint.programs
        """The programs; those of another order of the same actions may take their place."""
        self.gatherer = Gatherer(runtime.units)
        # A graph does the same in each micro-batch: it adds, also to the first gradient of a step.
        first = not self.plan.cuda_graphs
        self.reducer = Reducer(runtime.units, runtime.queue, writes_first=first)
        self.scale = loss_scale(self.plan.loss_scale, in_fp16=blueprint.trains_in_fp16)
        self.recorders: list[Recorder] = []
        """Records the training steps, if set."""
        self.inputs_are_cut = False
        """Whether the inputs of the latest step were `Microbatches`."""
        self._has_dropout = any(names_of(layer.module) for layer in blueprint.sequence.layers)
        self._infos: dict[Any, tuple[int, list[LayerInfo]]] = {}
        """By shape: the longest document that the layers took on the meta device, and what they gave."""
        self._sequences: Sequence[LocalSequence | None] = ()
        """This rank's part of each micro-batch's sequences in the latest step; None where they are whole."""
        self._weights: tuple[Tensor, Tensor] | None = None  # of each micro-batch, of the global batch
        self._totals: list[Tensor] = []
        self._batches = 0
        """How many batches with targets there were."""
        self._agreed: dict[tuple[str, str], None] = {}
        """On GPUs the calls that the ranks along an axis have agreed on, oldest first."""
        self.graphs: SegmentGraphs | None = None
        """The recorded graphs of training steps; None: nothing is recorded."""
        self._observer: InstructionObserver | None = None
        """Called after each instruction, if set."""
        self.action_times: ActionTimes | None = None
        """Measures the actions of training steps, if set."""
        if self.plan.cuda_graphs and is_accelerator(self.mesh.device):
            self.record_segments(CudaGraphRecorder(self.mesh.device))
        else:
            self.observe(None)

    def time_actions(self) -> ActionTimes:
        """Start to measure the actions of all later training steps; return the `ActionTimes`."""
        stages = self.steps.schedule.stages_of(self.mesh.index("pp"))
        self.action_times = ActionTimes(stages, self.mesh.traffic, clock_for(self.mesh.device))
        self.observe(self._observer)
        return self.action_times

    def record_segments(self, recorder: GraphRecorder, **options: Any) -> None:
        """Record the segments of later training steps as graphs; `options`: those of `SegmentGraphs`."""
        runtime = self.runtime
        communicates = not self.plan.tp == self.plan.cp == self.plan.ep == self.plan.etp == 1
        never = "layers communicate over tp, cp, ep or etp" if communicates else ""
        addresses = FixedAddresses(runtime.units, self.pipeline.stages)
        self.graphs = SegmentGraphs(
            recorder, self.pipeline, runtime.dropout, addresses, self.mesh.device, never=never, **options
        )
        self.observe(self._observer)

    def observe(self, observer: InstructionObserver | None) -> None:
        """Call `observer` after each instruction of later steps, without graphs; None removes it."""
        self._observer = observer
        handlers = [self.pipeline.handlers(), self.gatherer.handlers(), self.reducer.handlers()]
        if observer is not None:
            handlers.append(dict.fromkeys(INSTRUCTION_TYPES, lambda one: observer(one, self.runtime)))
        # Under tp and cp weight gradients wait for what a layer's backward sends, to overlap with it.
        may_join = self.pipeline.may_join if self.plan.tp == self.plan.cp == 1 else None
        self._executor = Executor(
            *handlers,
            bind_layers=self.pipeline.bind_layers,
            may_join=may_join,
            bind_segments=partial(self._bind_segments, with_graphs=observer is None),
        )

    def _bind_segments(
        self, segments: Sequence[Segment], runs: Sequence[RunCalls], *, with_graphs: bool
    ) -> Sequence[RunCalls]:
        """Return the functions that run a program's segments, as CUDA graphs or measured where set."""
        if self.graphs is not None and with_graphs:
            runs = self.graphs.bind(segments, runs)
        return runs if self.action_times is None else self.action_times.bind(segments, runs)

    @property
    def is_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.mesh.index("pp") == self.steps.schedule.rank_of[-1]

    @property
    def modules(self) -> list[nn.Module]:
        """This rank's layers."""
        return [layer.module for stage in self.pipeline.stages.values() for layer in stage.layers]

    def loss_batch(
        self, inputs: Value, targets: Value, rows: int | None = None, *, input_gradients: bool = False
    ) -> LossBatch:
        """Split the batch into micro-batches, and compute the weights by which their losses are averaged.

        `rows`: how many of its rows count in an evaluation, from the first on; None: all. Communication: as
        `Engine.forward_backward`, without that of the program and of the mean loss.
        """
        trains = torch.is_grad_enabled()
        if trains:
            _refuse_graphs(() if input_gradients else inputs, targets)
        (inputs, targets), length, whole = without_part(self.runtime.context_parallelism, inputs, targets)
        self._batches += 1
        every = self._batches <= COMPARED_BATCHES or self.mesh.guarded
        counted = self.plan.microbatches
        if not trains:  # any number of rows
            inputs, targets, counted = counted_microbatches(inputs, targets, counted, rows)
        hashes = [fingerprint_of_tokens(value, every=every) for value in (inputs, targets)]
        tokens = f"{hashes[0]}, of the targets {hashes[1]}"
        self.inputs_are_cut = isinstance(inputs, Microbatches)
        batch, parts = split_both(inputs, targets, self.plan.microbatches, (self.as_input, self._as_target))
        shapes = f"{signatures(batch)} with targets {signatures(parts)}"
        call = "a step" if rows is None else f"a step that counts {rows} rows"
        self.require_same_batch(call, shapes, tokens, whole, over_pp=every)
        local = local_inputs(batch, self.runtime.context_parallelism, length)
        pairs = zip(parts, local.sequences, strict=True)
        parts = [cut(part, sequence, "targets", length) for part, sequence in pairs]
        if self._has_dropout and trains:
            self.runtime.dropout.rows = self._rows(local.values)
        each = [self.runtime.loss.weight(part) for part in parts]
        weights = torch.stack([torch.as_tensor(weight, dtype=torch.float64) for weight in each])
        weights[counted:] = 0
        weights = sent(weights, self.mesh.device)
        documents: Sequence[TokenDocuments] = ()
        if self.runtime.balance is not None and trains:
            pairs_of_inputs = zip(local.values, local.sequences, strict=True)
            documents = [TokenDocuments.of(*pair) for pair in pairs_of_inputs]
        total, token_total = self._over_ranks(weights.sum(), documents)
        mean = divisor(self.runtime.loss, total)
        return LossBatch(local, parts, counted, weights, total, mean, documents, token_total)

    def _over_ranks(self, weight: Tensor, documents: Sequence[TokenDocuments]) -> tuple[Tensor, Tensor]:
        """Return the loss's weight of the global batch, and the number of its tokens in `documents`, 0-d.

        Communication: one all-reduce of both over `dp_cp`, or of the weight where there are no documents.
        """
        own = weight
        if documents:
            tokens = torch.tensor(sum(one.counted for one in documents), dtype=weight.dtype)
            own = torch.stack([weight, sent(tokens, weight.device)])
        started = all_reduce(own, self.mesh.group("dp_cp"), checked=False)
        sums = started.about("the loss's weight").wait()
        return (sums[0], sums[1]) if documents else (sums, torch.zeros_like(sums))

    def mean_loss(self, batch: LossBatch) -> Tensor:
        """Return the mean loss of the latest step over the global batch, 0-d, on every rank.

        Communication: one all-reduce of 8 bytes over `world`; in a training step with routers, of 8 bytes
        more for each of their experts and losses.
        """
        mean = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.is_last:
            totals = self.pipeline.loss_stage.totals
            filling = map(torch.zeros_like, totals[batch.counted :])
            self._totals = [*totals[: batch.counted], *filling]
        if self.is_last and self.mesh.index("tp") == 0:
            mean = torch.stack(self._totals).double().sum() / batch.divisor
        self._weights = batch.weights, batch.total_weight
        balance = self.runtime.balance if batch.documents else None
        own = mean if balance is None else torch.cat([mean[None], balance.totals()])
        summed = all_reduce(own, self.mesh.group("world"), checked=False).about("the mean loss").wait()
        if balance is None:
            return summed
        balance.settle(summed[1:])
        return summed[0]

    def begin_balance(self, batch: LossBatch) -> None:
        """Begin a training step of the routers' losses, if the model has routers."""
        if self.runtime.balance is not None:
            self.runtime.balance.begin(
                batch.documents, batch.token_total, self.scale.value, anew=self.reducer.starts_anew
            )

    def _rows(self, batch: Sequence[Value]) -> list[range]:
        """Return each micro-batch's range of rows (dim 0 of its first tensor) in the global batch.

        Communication: one all-reduce over `dp`, whose ranks may have different numbers of rows; on the CPU
        where the group has a transport for it, so that the host does not wait for the device.
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
        """Return the mean loss of each micro-batch of this data-parallel rank's last step."""
        weights, _ = self.loss_weights()
        losses, cp = torch.zeros_like(weights), self.mesh.group("cp")
        if self.is_last:
            both = torch.stack([torch.stack(self._totals).double(), weights])
            totals, whole = all_reduce(both, cp, checked=False).about("the losses over cp").wait()
            losses = totals / divisor(self.runtime.loss, whole)
        return broadcast(losses, self.mesh.group("pp"), self.steps.schedule.rank_of[-1], checked=False).wait()

    def loss_weights(self) -> tuple[Tensor, Tensor]:
        """Return the loss weights, such as token counts, of this rank's micro-batches and of the batch."""
        if self._weights is None:
            raise DataError("there are no losses yet: call forward_backward or evaluate first.")
        return self._weights

    def input_gradients(self) -> Value | None:
        """Return the gradients of the last step's inputs, of whole sequences, nested like the inputs."""
        found, batch = self.pipeline.input_gradients, self.pipeline.batch
        if not found:
            return None
        each = {
            number: [None if one is None else joined(one, self._sequences[number]) for one in found[number]]
            for number in sorted(found)
        }
        if self.inputs_are_cut:
            return Microbatches(with_tensors(batch[number], each[number]) for number in each)
        whole = (
            None if column[0] is None else torch.cat(column) for column in zip(*each.values(), strict=True)
        )
        return with_tensors(batch[0], whole)

    def drop_gradients(self) -> None:
        """Set all gradients to None: an optimizer's next step changes nothing, nor any router's bias."""
        self.reducer.drop()
        if self.runtime.balance is not None:
            self.runtime.balance.drop()

    def non_finite(self) -> Tensor:
        """Return whether this rank's losses and gradients of the last step are not finite: bool `[2]`."""
        losses = torch.stack(self._totals) if self.is_last else torch.zeros((), device=self.mesh.device)
        gradients = non_finite_gradients(self.runtime.units.values(), self.mesh.device)
        return torch.stack([~losses.isfinite().all(), gradients])

    def require_same_batch(
        self, call: str, shapes: str, tokens: str, whole: str | None, *, over_pp: bool = False
    ) -> None:
        """Raise CommunicationError where ranks along `pp`, `cp` or `tp` make a call on different batches.

        `shapes`: of the micro-batches. `tokens`: a hash of the batch's tokens, which on GPUs counts along
        `pp` with `over_pp` only. `whole`: describes the batch of which this rank has a part, if so.
        Communication: as `require_same_call`, over each of these axes.
        """
        alike = f"{call} on micro-batches of {shapes}"
        same = f"{alike}, tokens {tokens}"
        own = "give ranks that differ in pp, cp or tp only the same batch"
        self.require_same_call(same if over_pp or not self.mesh.uses_nccl else alike, "pp", own)
        self.require_same_call(same if whole is None else f"{call} on parts of {whole}", "cp", own)
        self.require_same_call(same, "tp", own)

    def require_same_call(self, call: str, axis: str, remedy: str = SAME_CALL) -> None:
        """Raise CommunicationError where ranks along `axis` make different calls.

        Communication: one all-gather of 256 bytes over `axis`, on the CPU, so that the host does not wait for
        its GPU; on GPUs only for calls that the ranks have not agreed on before. There a rank that makes
        another call than before waits for the others, and fails with this call in its error.
        """
        group = self.mesh.group(axis)
        if group.device_for_text(self.mesh.device).type != "cpu" or (axis, call) in self._agreed:
            return
        require_same_text(call, group, torch.device("cpu"), remedy=remedy)
        if self.mesh.uses_nccl:
            self._agreed[axis, call] = None
            while len(self._agreed) > REMEMBERED_SHAPES:
                del self._agreed[next(iter(self._agreed))]

    def as_input(self, value: Value) -> Value:
        """Cast floating-point inputs to the plan's precision; on the first stage move them to the device.

        Document ids stay where they are: the host reads them.
        """
        first = self.mesh.index("pp") == self.steps.schedule.rank_of[0]

        def convert(tensor: Tensor) -> Tensor:
            dtype = DTYPES[self.plan.precision] if tensor.is_floating_point() else None
            return sent(tensor, self.mesh.device if first else tensor.device, dtype)

        return map_inputs(convert, value)

    def _as_target(self, value: Value) -> Value:
        """Move targets to the device on the last stage; return them unchanged on others."""
        return map_tensors(lambda tensor: sent(tensor, self.mesh.device), value) if self.is_last else value

    def run(
        self,
        programs: Sequence[Program],
        batch: LocalInputs,
        targets: Sequence[Value] = (),
        scale: Tensor | None = None,
        *,
        input_gradients: bool = False,
        parameters_changed: bool = True,
    ) -> None:
        """Run this rank's program on a batch; `programs` has one for each rank of `pp`.

        `scale`: the factor of the summed loss for the backward. `parameters_changed`: an optimizer may have
        stepped since the last program.
        """
        if torch.is_autocast_enabled(self.mesh.device.type):
            raise PlanError("torch.autocast is active around a step: leave it, and set plan.precision.")
        if torch.is_inference_mode_enabled():
            raise PlanError("torch.inference_mode is active around a step: leave it, or use torch.no_grad.")
        self._sequences = batch.sequences
        infos = self._layer_infos(batch, input_gradients)
        self.pipeline.begin(batch.values, infos, batch.sequences, input_gradients=input_gradients)
        self.pipeline.loss_stage.begin(targets, scale)
        trains, program = torch.is_grad_enabled(), programs[self.mesh.index("pp")]
        if self.action_times is not None:
            self.action_times.enabled = trains
        try:
            if trains:
                self.reducer.begin(self.scale.value)
                if self.graphs is not None:
                    self.graphs.begin()
            if parameters_changed:
                self.gatherer.begin()
            # A backward runs in this thread: on a GPU autograd would hand each layer's to another one.
            with torch.autograd.set_multithreading_enabled(False):
                if trains and self.recorders:
                    with self.recorders[0].recording_step() as around:
                        self._executor.run(program, around)
                    for other in self.recorders[1:]:
                        other.step = self.recorders[0].step
                else:
                    self._executor.run(program)
            if not trains:
                self.pipeline.set_back()
        except BaseException:
            if self.runtime.balance is not None:
                self.runtime.balance.clear()
            self.pipeline.clear()
            if self.graphs is not None:
                self.graphs.clear()
            self.gatherer.clear()
            if trains:
                self.reducer.clear()
            raise

    def _layer_infos(self, batch: LocalInputs, input_gradients: bool) -> list[list[LayerInfo]]:
        """Return per micro-batch the `LayerInfo` (output shapes) of all layers; cached by input shape."""
        trains, sequences = torch.is_grad_enabled(), batch.sequences
        keys = [
            (signature(one), sequence and sequence.shape, input_gradients, trains)
            for one, sequence in zip(batch.values, sequences, strict=True)
        ]
        for key, one, sequence in zip(keys, batch.values, sequences, strict=True):
            longest = 0 if sequence is None else sequence.longest
            taken, infos = self._infos.get(key, (-1, []))
            if taken < longest:  # before ranks wait for each other, all refuse a document that is too long
                with running(sequence):
                    taken, infos = longest, self._infer(one, input_gradients)
            self._infos.pop(key, None)  # so that it is the latest
            self._infos[key] = taken, infos
        each = [self._infos[key][1] for key in keys]
        while len(self._infos) > REMEMBERED_SHAPES + len(set(keys)):
            del self._infos[next(iter(self._infos))]  # the least recently used
        return each

    def _infer(self, microbatch: Value, input_gradients: bool) -> list[LayerInfo]:
        layers, shape = self.runtime.meta_layers, signature(microbatch)
        if self.plan.cp > 1 and not self._infos:
            with running(None):
                layers.prove_positions_apart(microbatch)
        infos = layers.infer(microbatch, input_gradients=input_gradients)
        if layers.are_proved and all(known != shape for known, *_ in self._infos):
            layers.prove(microbatch)
        return infos


def _refuse_graphs(inputs: Value, targets: Value) -> None:
    """Raise DataError for a tensor of a training batch whose gradient is asked for, but not computed."""
    for what, value in {"inputs": inputs, "targets": targets}.items():
        given = value.value if isinstance(value, SequencePart) else value
        given = given.values if isinstance(given, Microbatches) else given
        if any(tensor.requires_grad for tensor in tensors_of(given)):
            raise DataError(
                f"the {what} require a gradient, which a step does not pass on: detach them, and for the "
                "gradients of inputs give input_gradients=True and read engine.input_gradients()."
            )
