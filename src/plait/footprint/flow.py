"""The memory of what flows through the stages of one rank, and of what their backwards wait for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from plait.footprint.ledger import Block, Category, Ledger
from plait.footprint.messages import MessageAccount
from plait.footprint.layers import Traces
from plait.footprint.traces import Phase, Trace
from plait.schedules.action import Action, Kind
from plait.schedules.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    HandOver,
    PostReceive,
    Release,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)

Names = dict[int, Block | None]
"""Which block stands for each number of a trace, in one micro-batch."""


class FlowAccount:
    """Enters in a ledger what `Worker`, `Stage` and `LossEnd` do with the tensors of each micro-batch."""

    def __init__(
        self,
        ledger: Ledger,
        messages: MessageAccount,
        stages: Mapping[int, Sequence[Trace]],
        traces: Traces,
        inputs: Sequence[Block],
    ) -> None:
        """`stages` are this rank's, layer by layer; `inputs` its batch, of which micro-batches are views."""
        self._ledger = ledger
        self._messages = messages
        self._stages = stages
        self._loss, self._clones = traces.loss, traces.clones
        self._inputs = inputs
        self._values: dict[tuple[int, int], Sequence[Block | None]] = {}
        self._gradients: dict[tuple[int, int], Sequence[Block | None]] = {}
        self._names: dict[tuple[int, int, int], Names] = {}
        self._losses: dict[int, Names] = {}

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What each pipeline instruction changes."""
        return {
            TakeBatch: lambda i: self._flow(i.action, self._inputs),
            PostReceive: lambda i: self._messages.post(i.action),
            AwaitReceive: lambda i: self._await_receive(i.action),
            HandOver: lambda i: self._hand_over(i.action),
            Send: lambda i: self._send(i.action, i.peer),
            RunLayer: lambda i: self._run_layer(i.action, i.layer),
            ComputeLoss: lambda i: self._compute_loss(i.action),
            SeedGradient: lambda i: self._seed(i.action),
            Release: lambda i: self._release(i.action),
            Finish: lambda i: self._messages.finish(),
        }

    def _flow(self, action: Action, blocks: Sequence[Block | None]) -> None:
        """What flows into a stage, forward or backward, is held until a layer takes it."""
        place = action.stage, action.microbatch
        flowing = self._values if action.kind is Kind.F else self._gradients
        flowing[place] = blocks
        self._ledger.hold((action.kind is Kind.F, *place), blocks)

    def _take(self, kind: Kind, stage: int, microbatch: int) -> Sequence[Block | None]:
        """What flows, once; its holder lets go of it."""
        self._ledger.drop((kind is Kind.F, stage, microbatch))
        return (self._values if kind is Kind.F else self._gradients).pop((stage, microbatch))

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
        self._flow(action, self._take(action.kind, source, action.microbatch))

    def _send(self, action: Action, peer: int) -> None:
        blocks = self._take(action.kind, action.stage, action.microbatch)
        if action.kind is Kind.F:
            self._messages.send(action, [block for block in blocks if block is not None], peer)
        else:
            self._messages.send_gradients(action, blocks, peer)

    def _run_layer(self, action: Action, layer: int) -> None:
        if action.kind is Kind.F:
            self._forward(action, layer)
        if action.kind in (Kind.I, Kind.B):
            self._backward(Action(action.stage, Kind.I, action.microbatch), layer)
        if action.kind in (Kind.W, Kind.B):
            self._ledger.reach(self._stages[action.stage][layer].weights)
            self._ledger.drop(("run", action.stage, action.microbatch, layer))
            del self._names[action.stage, action.microbatch, layer]

    def _forward(self, action: Action, layer: int) -> None:
        stage, microbatch, trace = action.stage, action.microbatch, self._stages[action.stage][layer]
        self._ledger.reach(trace.forward.most)
        given = self._take(Kind.F, stage, microbatch)
        names: Names = dict(zip(trace.inputs, given, strict=True))
        self._names[stage, microbatch, layer] = names
        self._phase(("run", stage, microbatch, layer), action, trace.forward, names)

    def _backward(self, action: Action, layer: int) -> None:
        stage, microbatch, trace = action.stage, action.microbatch, self._stages[action.stage][layer]
        self._ledger.reach(trace.backward.most)
        names = self._names[stage, microbatch, layer]
        pairs = zip(trace.seeds, self._gradients[stage, microbatch], strict=True)
        names |= {number: block for number, block in pairs if number is not None}
        self._phase(("run", stage, microbatch, layer), action, trace.backward, names)

    def _phase(self, holder: Hashable, action: Action, phase: Phase, names: Names) -> None:
        """Make what a phase makes, keep what it keeps, and let its results flow."""
        names |= _made(phase)
        self._ledger.hold(holder, _blocks(phase.held, names))
        self._flow(action, _blocks(phase.flows, names))

    def _compute_loss(self, action: Action) -> None:
        given = self._values[action.stage, action.microbatch]
        if self._clones:
            given = [Block(self._clones, Category.ACTIVATIONS)]
        forward = self._loss.forward
        self._ledger.reach(self._clones + forward.most)
        names: Names = dict(zip(self._loss.inputs, given, strict=True))
        names |= _made(forward)
        self._losses[action.microbatch] = names
        self._ledger.hold(("loss", action.microbatch), _blocks(forward.held, names))
        self._take(Kind.F, action.stage, action.microbatch)

    def _seed(self, action: Action) -> None:
        backward, names = self._loss.backward, self._losses.pop(action.microbatch)
        self._ledger.reach(backward.most)
        names |= _made(backward)
        self._flow(action, _blocks(backward.flows, names))
        self._ledger.drop(("loss", action.microbatch))

    def _release(self, action: Action) -> None:
        if action.stage == 0 and action.kind is not Kind.F:
            self._take(Kind.I, 0, action.microbatch)
        self._messages.release(action.stage, action.microbatch)


def _made(phase: Phase) -> Names:
    return {number: Block(nbytes, Category.ACTIVATIONS) for number, nbytes in phase.made.items()}


def _blocks(numbers: Iterable[int | None], names: Names) -> list[Block | None]:
    return [None if number is None else names[number] for number in numbers]
