"""One rank's part of the pipeline: one method per pipeline instruction, on its stages and exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from plait.engine.pipeline.executor import Handlers
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.pipeline.stage import Gradients, Stage
from plait.engine.pipeline.stage_exchange import Exchange
from plait.models.layers.shape_inference import LayerInfo
from plait.schedules.action import Kind
from plait.schedules.lowering.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    KeepOutput,
    LocalTransfer,
    PostReceive,
    ReleaseBuffers,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.tensor.nested_values import Value, leaf_of, map_tensors, tensors_of
from plait.tensor.running_sequence import LocalSequence, running


class PipelineRank:
    """The stages of one rank of `pp`, their exchange with other ranks, and the loss stage."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        exchange: Exchange,
        loss_stage: LossStage,
        layers_per_stage: Sequence[int],
    ) -> None:
        """`layers_per_stage`: the number of layers of every stage of the model."""
        self.stages = stages
        self.exchange = exchange
        self.loss_stage = loss_stage
        self._ends = list(accumulate(layers_per_stage))
        """Of each stage the number of its last layer in the model, plus one."""
        self.batch: Sequence[Value] = ()
        self.input_gradients: dict[int, Gradients] = {}
        self._keeps_input_gradients = False
        self._infos: Sequence[Sequence[LayerInfo]] = ()
        self._stage_outputs: Sequence[Sequence[LayerInfo]] = ()
        """Per stage of the model, then per micro-batch."""

    def handlers(self) -> Handlers:
        """Return by type of instruction the function that runs it, but for `RunLayer`."""
        return {
            TakeBatch: self._take_batch,
            PostReceive: lambda i: self.exchange.post(i.action, i.peer),
            AwaitReceive: self._await_receive,
            LocalTransfer: self._transfer,
            Send: self._send,
            ComputeLoss: self._compute_loss,
            KeepOutput: self._keep_output,
            SeedGradient: self._seed_gradient,
            ReleaseBuffers: self._release,
            Finish: lambda i: self.exchange.finish(),
        }

    def may_join(self, instruction: RunLayer) -> bool:
        """Return whether a layer may run in one autograd graph with others: if it shares no parameter.

        Else autograd would add up the parameter's gradients in another order than layer by layer. Compiled
        layers have no autograd graph. The model's last layer runs alone where its output is larger than its
        input, as logits are: the gradient of a graph's output is alive until the whole graph has run.
        """
        stage, layer = self.stages[instruction.action.stage], instruction.layer
        number = self._ends[stage.number] - len(stage.layers) + layer
        grows = number == self._ends[-1] - 1 and self._last_layer_grows
        return not stage.compiled and layer not in stage.sharing and not grows

    @property
    def _last_layer_grows(self) -> bool:
        """Whether the output of the model's last layer takes more bytes than that of the layer before."""
        if not self._infos or len(self._infos[0]) == 1:
            return False
        before, last = (sum(one.nbytes for one in info.tensors) for info in self._infos[0][-2:])
        return last > before

    def bind_layers(self, instructions: Sequence[RunLayer]) -> Callable[[], None]:
        """Return a function that runs the layers of one action's `instructions` in one autograd graph."""
        number, kind, microbatch = instructions[0].action
        layers = [instruction.layer for instruction in instructions]
        stage, first = self.stages[number], min(layers)
        run: dict[Kind, Callable[..., None]] = {
            Kind.F: stage.forward,
            Kind.I: stage.backward_input,
            Kind.W: stage.backward_weight,
            Kind.B: stage.backward,
        }
        others = [max(layers)] if kind is Kind.F and len(layers) > 1 else []
        return partial(run[kind], microbatch, first, *others)

    @property
    def last_stage(self) -> int:
        """The number of the model's last stage, whether or not it is on this rank."""
        return len(self._ends) - 1

    def begin(
        self,
        batch: Sequence[Value],
        infos: Sequence[Sequence[LayerInfo]],
        sequences: Sequence[LocalSequence | None] = (),
        *,
        input_gradients: bool = False,
    ) -> None:
        """Start a step; `batch` has each micro-batch's input, `infos` the shapes of its layers' outputs.

        `sequences`: this rank's part of each micro-batch's sequences, if not the whole of all.
        `input_gradients`: whether the gradients of floating-point inputs of the model are kept.
        """
        self.batch = batch
        self.input_gradients, self._keeps_input_gradients = {}, input_gradients
        for stage in self.stages.values():
            stage.sequences = sequences
            stage.begin()
        if list(map(id, infos)) == list(map(id, self._infos)):
            return  # shapes are those of the step before
        self._infos = infos
        for number, stage in self.stages.items():
            end = self._ends[number]
            stage.expect([one[end - len(stage.layers) : end] for one in infos])
        self._stage_outputs = [[one[end - 1] for one in infos] for end in self._ends]
        self.exchange.begin([[info.tensors for info in outputs] for outputs in self._stage_outputs])

    @property
    def output_infos(self) -> Sequence[LayerInfo]:
        """Shapes and dtypes of the model's output per micro-batch of the latest step; known on every rank."""
        return self._stage_outputs[-1]

    def set_back(self) -> None:
        """Restore the attributes in which layers count their runs, since an evaluation must not count."""
        for stage in self.stages.values():
            stage.set_back()

    def clear(self) -> None:
        """Discard all unfinished micro-batches after an exception within a step."""
        for stage in self.stages.values():
            stage.clear()
        self.exchange.clear()
        self.loss_stage.clear()

    def _take_batch(self, instruction: TakeBatch) -> None:
        action = instruction.action
        self.stages[action.stage].values[action.microbatch] = map_tensors(
            lambda tensor: leaf_of(tensor, self._keeps_input_gradients and tensor.is_floating_point()),
            self.batch[action.microbatch],
        )

    def _await_receive(self, instruction: AwaitReceive) -> None:
        action = instruction.action
        stage, received = self.stages[action.stage], iter(self.exchange.take(action))
        if action.kind is Kind.F:
            sent = self._stage_outputs[action.stage - 1][action.microbatch]
            leaves = sent.rebuild(lambda info: leaf_of(next(received), info.requires_grad))
            stage.values[action.microbatch] = leaves
        else:
            infos = self._stage_outputs[action.stage][action.microbatch].tensors
            gradients = [next(received) if info.requires_grad else None for info in infos]
            stage.gradients[action.microbatch] = gradients

    def _transfer(self, instruction: LocalTransfer) -> None:
        number, kind, microbatch = instruction.action
        if kind is Kind.F:
            self.stages[number].values[microbatch] = self.stages[number - 1].values.pop(microbatch)
        else:
            self.stages[number].gradients[microbatch] = self.stages[number + 1].gradients.pop(microbatch)

    def _send(self, instruction: Send) -> None:
        action, stage = instruction.action, self.stages[instruction.action.stage]
        if action.kind is Kind.F:
            tensors = list(tensors_of(stage.values.pop(action.microbatch)))
            self.exchange.send(action, [tensor.detach() for tensor in tensors], instruction.peer)
        else:
            gradients = stage.gradients.pop(action.microbatch)
            self.exchange.send_gradients(action, gradients, instruction.peer)

    def _compute_loss(self, instruction: ComputeLoss) -> None:
        stage, microbatch = self.stages[instruction.action.stage], instruction.action.microbatch
        output = stage.values.pop(microbatch)
        if self.loss_stage.writes_output and stage.output_is_read(microbatch):
            output = map_tensors(lambda leaf: leaf_of(leaf.clone(), leaf.requires_grad), output)
        sequence = stage.sequences[microbatch] if stage.sequences else None
        with running(sequence):  # a loss of whole sequences adds over `cp`
            self.loss_stage.compute(microbatch, output)

    def _keep_output(self, instruction: KeepOutput) -> None:
        action = instruction.action
        output = self.stages[action.stage].values.pop(action.microbatch)
        # A last layer may return what it received, in a buffer that receives the next micro-batch.
        kept = map_tensors(lambda tensor: self.exchange.safe_to_keep(tensor.detach()), output)
        self.loss_stage.keep(action.microbatch, kept)

    def _seed_gradient(self, instruction: SeedGradient) -> None:
        action = instruction.action
        self.stages[action.stage].gradients[action.microbatch] = self.loss_stage.seed(action.microbatch)

    def _release(self, instruction: ReleaseBuffers) -> None:
        action = instruction.action
        if action.stage == 0 and action.kind is not Kind.F:
            gradients = self.stages[0].gradients.pop(action.microbatch)
            if self._keeps_input_gradients:
                self.input_gradients[action.microbatch] = [
                    None if gradient is None else self.exchange.safe_to_keep(gradient)
                    for gradient in gradients
                ]
        self.exchange.release(action.stage, action.microbatch)
