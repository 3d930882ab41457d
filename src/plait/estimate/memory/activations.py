"""The memory of activations: outputs of layers, tensors saved for the backward, sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from plait.engine.pipeline.stage_exchange import Crossing, buffer_sizes, receive_buffers
from plait.estimate.memory.layer_traces import PhaseTrace, Trace
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.estimate.memory.model_traces import ModelTraces
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.messages import SENDS_IN_FLIGHT
from plait.schedules.lowering.program import (
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


class ReceiveBufferAccount:
    """Records in a memory ledger the buffers of one rank's sends and receives between stages."""

    def __init__(self, ledger: MemoryLedger, crossing: Crossing) -> None:
        """`crossing`: the tensors that stages exchange, with the same shapes for all micro-batches."""
        self._ledger = ledger
        self._crossing = crossing
        self._sizes = buffer_sizes(crossing)
        self._free: dict[int, list[MemoryBlock]] = defaultdict(list)
        self._pool: set[MemoryBlock] = set()
        self._posted: dict[Action, list[MemoryBlock]] = {}
        self._lent: dict[tuple[int, int], list[MemoryBlock]] = defaultdict(list)
        self._sends: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        self._sent = 0

    def post(self, action: Action) -> None:
        """Record that buffers are allocated, or reused from the pool, to receive the input of `action`."""
        received = receive_buffers(action._replace(microbatch=0), self._crossing, self._sizes)
        self._posted[action] = [self._take(size) for _, size in received]

    def take(self, action: Action) -> list[MemoryBlock]:
        """Return the memory blocks of the tensors received for `action`; they stay in use until `release`."""
        blocks = self._posted.pop(action)
        self._lent[action.stage, action.microbatch] += blocks
        return blocks

    def send(self, action: Action, blocks: Sequence[MemoryBlock], peer: int) -> None:
        """Record a send to `peer`, which holds its blocks until `SENDS_IN_FLIGHT` later ones have started."""
        under_way = self._sends[peer, action.kind]
        if len(under_way) == SENDS_IN_FLIGHT:
            self._ledger.drop(("send", under_way.pop(0)))
        self._sent += 1
        self._ledger.hold(("send", self._sent), map(self.safe_to_keep, blocks))
        under_way.append(self._sent)

    def send_gradients(self, action: Action, gradients: Sequence[MemoryBlock | None], peer: int) -> None:
        """Record a send of gradients, with zeros for gradients that are None."""
        pairs = zip(self._crossing[action.stage - 1][0], gradients, strict=True)
        blocks = [
            MemoryBlock(info.nbytes, Category.MESSAGES) if gradient is None else gradient
            for info, gradient in pairs
            if info.requires_grad
        ]
        self.send(action, blocks, peer)

    def safe_to_keep(self, block: MemoryBlock) -> MemoryBlock:
        """Return a memory block that a send may hold: `block`, or a new one if that is a receive buffer."""
        return MemoryBlock(block.nbytes, Category.MESSAGES) if block in self._pool else block

    def release(self, stage: int, microbatch: int) -> None:
        """Give the receive buffers of a stage's micro-batch back to the pool, for later receives."""
        for block in self._lent.pop((stage, microbatch), ()):
            self._free[block.nbytes].append(block)

    def finish(self) -> None:
        """Record that all sends are finished: release the memory blocks that they hold."""
        for under_way in self._sends.values():
            for number in under_way:
                self._ledger.drop(("send", number))
            under_way.clear()

    def _take(self, nbytes: int) -> MemoryBlock:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        block = MemoryBlock(nbytes, Category.MESSAGES)
        self._pool.add(block)
        self._ledger.hold(("pool", len(self._pool)), [block])
        return block


Blocks = dict[int, MemoryBlock | None]
"""The blocks of one micro-batch, by the number of their storage in a trace."""


class ActivationAccount:
    """Records in a memory ledger the activations that a rank's pipeline instructions allocate and free."""

    def __init__(
        self,
        ledger: MemoryLedger,
        messages: ReceiveBufferAccount,
        spans: Mapping[int, range],
        traces: ModelTraces,
        inputs: Sequence[MemoryBlock],
    ) -> None:
        """`spans`: the layers of each local stage; `inputs`: the memory blocks of the batch."""
        self._ledger = ledger
        self._messages = messages
        self._stages: Mapping[int, Sequence[Trace]] = {
            stage: [traces.layers[layer] for layer in layers] for stage, layers in spans.items()
        }
        self._shared = {stage: [traces.shared[layer] for layer in layers] for stage, layers in spans.items()}
        self._loss, self._output_copy = traces.loss, traces.output_copy
        self._inputs = inputs
        self._current: dict[Hashable, Sequence[MemoryBlock | None]] = {}
        """Activations and gradients between layers, by direction, stage and micro-batch."""
        self._runs: dict[tuple[int, int, int], Blocks] = {}
        """By stage, micro-batch and layer."""
        self._results: dict[int, dict[Hashable, MemoryBlock]] = defaultdict(dict)
        """By micro-batch: what layers share for its sequences; kept until the next step."""
        self._losses: dict[int, Blocks] = {}

    def begin(self) -> None:
        """Begin a step: release in the ledger the results that layers shared in the step before."""
        for microbatch in self._results:
            self._ledger.drop(("sequences", microbatch))
        self._results.clear()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Return a dict from type of pipeline instruction to the function that records it in the ledger."""
        return {
            TakeBatch: lambda i: self._put(i.action, self._inputs),
            PostReceive: lambda i: self._messages.post(i.action),
            AwaitReceive: lambda i: self._await_receive(i.action),
            LocalTransfer: lambda i: self._transfer(i.action),
            Send: lambda i: self._send(i.action, i.peer),
            RunLayer: lambda i: self._run_layer(i.action, i.layer),
            ComputeLoss: lambda i: self._compute_loss(i.action),
            SeedGradient: lambda i: self._seed(i.action),
            ReleaseBuffers: lambda i: self._release(i.action),
            Finish: lambda i: self._messages.finish(),
        }

    def _put(self, action: Action, blocks: Sequence[MemoryBlock | None]) -> None:
        """Store memory `blocks` as activations or gradients of a stage's micro-batch, until `_take`."""
        key = _key(action)
        self._current[key] = blocks
        self._ledger.hold(key, blocks)

    def _take(self, action: Action) -> Sequence[MemoryBlock | None]:
        """Return the memory blocks that `_put` stored for a stage's micro-batch; release them."""
        key = _key(action)
        self._ledger.drop(key)
        return self._current.pop(key)

    def _await_receive(self, action: Action) -> None:
        received = self._messages.take(action)
        if action.kind is Kind.F:
            self._put(action, received)
        else:
            blocks = iter(received)
            last = self._stages[action.stage][-1]
            self._put(action, [None if seed is None else next(blocks) for seed in last.output_gradients])

    def _transfer(self, action: Action) -> None:
        source = action.stage - 1 if action.kind is Kind.F else action.stage + 1
        self._put(action, self._take(action._replace(stage=source)))

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
            self._share(action.microbatch, self._shared[action.stage][layer])
            self._phase(run, action, trace.forward, trace.inputs)
        at_once = trace.whole_backward_peak if action.kind is Kind.B else None
        if action.kind in (Kind.I, Kind.B):
            self._phase(run, action, trace.backward, trace.output_gradients, at_once)
        if action.kind in (Kind.W, Kind.B):
            if at_once is None:
                self._ledger.record_temporary(trace.weight_peak)
            self._ledger.drop(("run", run))
            self._ledger.drop(("loss", run))
            del self._runs[run]

    def _share(self, microbatch: int, shared: Mapping[Hashable, int]) -> None:
        """Record the results that a layer shares with others for the sequences of a micro-batch."""
        results = self._results[microbatch]
        if not shared.keys() <= results.keys():
            for key, nbytes in shared.items():
                results.setdefault(key, MemoryBlock(nbytes, Category.ACTIVATIONS))
            self._ledger.hold(("sequences", microbatch), results.values())

    def _phase(
        self,
        run: tuple[int, int, int],
        action: Action,
        phase: PhaseTrace,
        given: Iterable[int | None],
        peak: int | None = None,
    ) -> None:
        """Simulate a layer's forward or backward: take input, allocate and save tensors, store results.

        `peak`: in place of the phase's.
        """
        self._ledger.record_temporary(phase.peak if peak is None else peak)
        known = self._runs[run]
        known |= _named(given, self._take(action)) | _made(phase)
        self._ledger.hold(("run", run), _blocks(phase.saved, known))
        self._put(action, _blocks(phase.results, known))

    def _compute_loss(self, action: Action) -> None:
        forward = self._loss.forward
        self._ledger.record_temporary(self._output_copy + forward.peak)
        given = self._take(action)
        if self._output_copy:
            given = [MemoryBlock(self._output_copy, Category.ACTIVATIONS)]
        known = _named(self._loss.inputs, given) | _made(forward)
        self._losses[action.microbatch] = known
        self._ledger.hold(("loss", action.microbatch), _blocks(forward.saved, known))

    def _seed(self, action: Action) -> None:
        backward = self._loss.backward
        self._ledger.record_temporary(backward.peak)
        known = self._losses.pop(action.microbatch) | _made(backward)
        last = action.stage, action.microbatch, len(self._stages[action.stage]) - 1
        self._ledger.hold(("loss", last), _blocks(backward.saved, known))
        self._put(action, _blocks(backward.results, known))
        self._ledger.drop(("loss", action.microbatch))

    def _release(self, action: Action) -> None:
        if action.stage == 0 and action.kind is not Kind.F:
            self._take(action)
        self._messages.release(action.stage, action.microbatch)


def _key(action: Action) -> Hashable:
    return "forward" if action.kind is Kind.F else "backward", action.stage, action.microbatch


def _named(numbers: Iterable[int | None], blocks: Iterable[MemoryBlock | None]) -> Blocks:
    pairs = zip(numbers, blocks, strict=True)
    return {number: block for number, block in pairs if number is not None}


def _made(phase: PhaseTrace) -> Blocks:
    return {number: MemoryBlock(nbytes, Category.ACTIVATIONS) for number, nbytes in phase.allocated.items()}


def _blocks(numbers: Iterable[int | None], known: Blocks) -> list[MemoryBlock | None]:
    return [None if number is None else known[number] for number in numbers]
