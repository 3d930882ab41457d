"""The worker of one rank: a method for each pipeline instruction, over its stages and its exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from plait.errors import CommunicationError
from plait.layers.nested import Value, leaf_of, map_tensors, tensors_of
from plait.layers.shape_inference import LayerInfo
from plait.pipeline.exchange import Exchange
from plait.pipeline.executor import Handlers
from plait.pipeline.loss_end import LossEnd
from plait.pipeline.stage import Gradients, Stage
from plait.schedules.action import Action, Kind
from plait.schedules.program import (
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


class Worker:
    """Carries out the pipeline instructions of one rank."""

    def __init__(self, stages: Mapping[int, Stage], exchange: Exchange, loss_end: LossEnd) -> None:
        self.stages = stages
        self.exchange = exchange
        self.loss_end = loss_end
        self.batch: Sequence[Value] = ()
        self.input_gradients: dict[int, Gradients] = {}
        self._infos: Sequence[Sequence[LayerInfo]] = ()
        self._ends: Sequence[Sequence[LayerInfo]] = ()

    def handlers(self) -> Handlers:
        """What each pipeline instruction does."""
        return {
            TakeBatch: self._take_batch,
            PostReceive: lambda i: self.exchange.post(i.action, i.peer),
            AwaitReceive: self._await_receive,
            LocalTransfer: self._hand_over,
            Send: self._send,
            RunLayer: self._run_layer,
            ComputeLoss: self._compute_loss,
            KeepOutput: self._keep_output,
            SeedGradient: self._seed_gradient,
            ReleaseBuffers: self._release,
            Finish: lambda i: self.exchange.finish(),
        }

    def begin(
        self, batch: Sequence[Value], infos: Sequence[Sequence[LayerInfo]], counts: Sequence[int]
    ) -> None:
        """Start a step on a batch, with `infos` for all layers of the model; both per micro-batch.

        `counts` are the layers of each stage of the model.
        """
        self.batch = batch
        self.input_gradients = {}
        if list(map(id, infos)) == list(map(id, self._infos)):
            return  # as in the step before, so that all that follows from them is there
        self._infos = infos
        behind = list(accumulate(counts))
        for number, stage in self.stages.items():
            first = behind[number] - counts[number]
            stage.infos = [one[first : behind[number]] for one in infos]
        self._ends = [[one[layer - 1] for one in infos] for layer in behind]
        self.exchange.begin([[info.tensors for info in ends] for ends in self._ends])

    @property
    def output_infos(self) -> Sequence[LayerInfo]:
        """For each micro-batch of the latest step, what the model's last layer gives, on every rank."""
        return self._ends[-1]

    def clear(self) -> None:
        """Forget everything in flight, after an exception in the middle of a step."""
        for stage in self.stages.values():
            stage.clear()
        self.exchange.clear()
        self.loss_end.clear()

    def _take_batch(self, instruction: TakeBatch) -> None:
        action = instruction.action
        stage = self.stages[action.stage]
        value = map_tensors(
            lambda tensor: leaf_of(tensor, stage.input_gradients and tensor.is_floating_point()),
            self.batch[action.microbatch],
        )
        stage.feed(action.microbatch, value)

    def _await_receive(self, instruction: AwaitReceive) -> None:
        action = instruction.action
        stage, received = self.stages[action.stage], iter(self.exchange.take(action))
        if action.kind is Kind.F:
            value = self._ends[action.stage - 1][action.microbatch].rebuild(
                lambda info: leaf_of(next(received), info.requires_grad)
            )
            stage.feed(action.microbatch, value)
        else:
            infos = self._ends[action.stage][action.microbatch].tensors
            gradients = [next(received) if info.requires_grad else None for info in infos]
            stage.seed(action.microbatch, gradients)

    def _hand_over(self, instruction: LocalTransfer) -> None:
        stage, kind, microbatch = (
            instruction.action.stage,
            instruction.action.kind,
            instruction.action.microbatch,
        )
        if kind is Kind.F:
            self.stages[stage].feed(microbatch, self.stages[stage - 1].take_output(microbatch))
        else:
            self.stages[stage].seed(microbatch, self.stages[stage + 1].take_gradients(microbatch))

    def _send(self, instruction: Send) -> None:
        action, stage = instruction.action, self.stages[instruction.action.stage]
        if action.kind is Kind.F:
            tensors = list(tensors_of(stage.take_output(action.microbatch)))
            self.exchange.send(action, [tensor.detach() for tensor in tensors], instruction.peer)
        else:
            gradients = stage.take_gradients(action.microbatch)
            self.exchange.send_gradients(action, gradients, instruction.peer)

    def _run_layer(self, instruction: RunLayer) -> None:
        action = instruction.action
        stage = self.stages[action.stage]
        run = {
            Kind.F: stage.forward,
            Kind.I: stage.backward_input,
            Kind.W: stage.backward_weight,
            Kind.B: stage.backward,
        }
        with _In(action):
            run[action.kind](action.microbatch, instruction.layer)

    def _compute_loss(self, instruction: ComputeLoss) -> None:
        stage, microbatch = self.stages[instruction.action.stage], instruction.action.microbatch
        output = stage.take_output(microbatch)
        if self.loss_end.spends and stage.output_is_read(microbatch):
            output = map_tensors(lambda leaf: leaf_of(leaf.clone(), leaf.requires_grad), output)
        with _In(instruction.action):
            self.loss_end.compute(microbatch, output)

    def _keep_output(self, instruction: KeepOutput) -> None:
        action = instruction.action
        output = self.stages[action.stage].take_output(action.microbatch)
        # A last layer may give what it received, in a buffer that the next micro-batch is received into.
        kept = map_tensors(lambda tensor: self.exchange.outlasting(tensor.detach()), output)
        self.loss_end.keep(action.microbatch, kept)

    def _seed_gradient(self, instruction: SeedGradient) -> None:
        action = instruction.action
        with _In(action):
            seed = self.loss_end.seed(action.microbatch)
        self.stages[action.stage].seed(action.microbatch, seed)

    def _release(self, instruction: ReleaseBuffers) -> None:
        action: Action = instruction.action
        if action.stage == 0 and action.kind is not Kind.F:
            gradients = self.stages[0].take_gradients(action.microbatch)
            if self.stages[0].input_gradients:
                self.input_gradients[action.microbatch] = [
                    None if gradient is None else self.exchange.outlasting(gradient) for gradient in gradients
                ]
        self.exchange.release(action.stage, action.microbatch)


class _In:
    """Lets what fails between ranks within an action say which one it was."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommunicationError):
            error.args = (f"in {self.action}: {error}",)
