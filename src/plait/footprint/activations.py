"""The memory of what flows through the stages of one rank, and of what their backwards wait for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from plait.footprint.layer_traces import ModelTraces
from plait.footprint.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.footprint.receive_buffers import ReceiveBufferAccount
from plait.footprint.traces import PhaseTrace, Trace
from plait.schedules.action import Action, Kind
from plait.schedules.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    LocalTransfer,
    PostReceive,
    ReleaseBuffers,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)

Names = dict[int, MemoryBlock | None]
"""Which block stands for each number of a trace, in one micro-batch."""


class ActivationAccount:
    """Enters in a ledger what a `PipelineRank` and its stages do with the tensors of each micro-batch."""

    def __init__(
        self,
        ledger: MemoryLedger,
        messages: ReceiveBufferAccount,
        stages: Mapping[int, Sequence[Trace]],
        traces: ModelTraces,
        inputs: Sequence[MemoryBlock],
    ) -> None:
        """`stages` are this rank's, layer by layer; `inputs` its batch, of which micro-batches are views."""
        self._ledger = ledger
        self._messages = messages
        self._stages = stages
        self._loss, self._clones = traces.loss, traces.clones
        self._inputs = inputs
        self._flowing: dict[Hashable, Sequence[MemoryBlock | None]] = {}
        """Forward and backward, per stage and micro-batch."""
        self._runs: dict[tuple[int, int, int], Names] = {}
        """Per stage, micro-batch and layer."""
        self._losses: dict[int, Names] = {}

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What each pipeline instruction changes."""
        return {
            TakeBatch: lambda i: self._flow(i.action, self._inputs),
            PostReceive: lambda i: self._messages.post(i.action),
            AwaitReceive: lambda i: self._await_receive(i.action),
            LocalTransfer: lambda i: self._hand_over(i.action),
            Send: lambda i: self._send(i.action, i.peer),
            RunLayer: lambda i: self._run_layer(i.action, i.layer),
            ComputeLoss: lambda i: self._compute_loss(i.action),
            SeedGradient: lambda i: self._seed(i.action),
            ReleaseBuffers: lambda i: self._release(i.action),
            Finish: lambda i: self._messages.finish(),
        }

    def _flow(self, action: Action, blocks: Sequence[MemoryBlock | None]) -> None:
        """What flows into or out of a stage, forward or backward, is held until somebody takes it."""
        flow = _flow_of(action)
        self._flowing[flow] = blocks
        self._ledger.hold(flow, blocks)

    def _take(self, action: Action) -> Sequence[MemoryBlock | None]:
        """What flows, once; who takes it has to hold it."""
        flow = _flow_of(action)
        self._ledger.drop(flow)
        return self._flowing.pop(flow)

    def _await_receive(self, action: Action) -> None:
        received = self._messages.take(action)
        if action.kind is Kind.F:
            self._flow(action, received)
        else:
            blocks = iter(received)
            last = self._stages[action.stage][-1]
            self._flow(action, [None if seed is None else next(blocks) for seed in last.seeds])

    def _hand_over(self, action: Action) -> None:
        source = action.stage - 1 if action.kind is Kind.F else action.stage + 1
        self._flow(action, self._take(action._replace(stage=source)))

    def _send(self, action: Action, peer: int) -> None:
        blocks = self._take(action)
        if action.kind is Kind.F:
            self._messages.send(action, [block for block in blocks if block is not None], peer)
        else:
            self._messages.send_gradients(action, blocks, peer)

    def _run_layer(self, action: Action, layer: int) -> None:
        run, trace = (action.stage, action.microbatch, layer), self._stages[action.stage][layer]
        if action.kind is Kind.F:
            self._runs[run] = {}
            self._phase(run, action, trace.forward, trace.inputs)
        if action.kind in (Kind.I, Kind.B):
            self._phase(run, action, trace.backward, trace.seeds)
        if action.kind in (Kind.W, Kind.B):
            self._ledger.reach(trace.weights)
            self._ledger.drop(("run", run))
            del self._runs[run]

    def _phase(
        self, run: tuple[int, int, int], action: Action, phase: PhaseTrace, given: Iterable[int | None]
    ) -> None:
        """Take what flows, make what the phase makes, keep what it keeps, and let its results flow."""
        self._ledger.reach(phase.most)
        names = self._runs[run]
        names |= _named(given, self._take(action)) | _made(phase)
        self._ledger.hold(("run", run), _blocks(phase.held, names))
        self._flow(action, _blocks(phase.flows, names))

    def _compute_loss(self, action: Action) -> None:
        forward = self._loss.forward
        self._ledger.reach(self._clones + forward.most)
        given = self._take(action)
        if self._clones:
            given = [MemoryBlock(self._clones, Category.ACTIVATIONS)]
        names = _named(self._loss.inputs, given) | _made(forward)
        self._losses[action.microbatch] = names
        self._ledger.hold(("loss", action.microbatch), _blocks(forward.held, names))

    def _seed(self, action: Action) -> None:
        backward = self._loss.backward
        self._ledger.reach(backward.most)
        names = self._losses.pop(action.microbatch) | _made(backward)
        self._flow(action, _blocks(backward.flows, names))
        self._ledger.drop(("loss", action.microbatch))

    def _release(self, action: Action) -> None:
        if action.stage == 0 and action.kind is not Kind.F:
            self._take(action)
        self._messages.release(action.stage, action.microbatch)


def _flow_of(action: Action) -> Hashable:
    return "forward" if action.kind is Kind.F else "backward", action.stage, action.microbatch


def _named(numbers: Iterable[int | None], blocks: Iterable[MemoryBlock | None]) -> Names:
    pairs = zip(numbers, blocks, strict=True)
    return {number: block for number, block in pairs if number is not None}


def _made(phase: PhaseTrace) -> Names:
    return {number: MemoryBlock(nbytes, Category.ACTIVATIONS) for number, nbytes in phase.made.items()}


def _blocks(numbers: Iterable[int | None], names: Names) -> list[MemoryBlock | None]:
    return [None if number is None else names[number] for number in numbers]
