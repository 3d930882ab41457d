"""Memory of one micro-batch that passes all layers of a model alone, from traces of the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.estimate.memory.activations import ActivationAccount, ReceiveBufferAccount
from plait.estimate.memory.layer_traces import Trace
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.estimate.memory.model_traces import ModelTraces
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.program import ComputeLoss, Instruction, RunLayer, SeedGradient, TakeBatch

_FORWARD, _INPUTS, _WEIGHTS = (Action(0, kind, 0) for kind in (Kind.F, Kind.I, Kind.W))


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes of the activations of one micro-batch on one rank that runs all layers, without the batch."""

    kept: tuple[float, ...]
    """What the layers before each layer keep for their backwards, and at last what all layers keep."""
    output: float
    """What the model's output takes beside what layers keep, before the loss is computed."""
    backward: tuple[float, ...]
    """The most during the input gradient of each layer, with what the layers before it keep."""

    def further(self, other: MicrobatchMemory, factor: float) -> MicrobatchMemory:
        """Return the memory extrapolated from this and `other`: this + `factor` · (`other` − this)."""

        def grown(one: float, two: float) -> float:
            return one + factor * (two - one)

        return MicrobatchMemory(
            tuple(map(grown, self.kept, other.kept)),
            grown(self.output, other.output),
            tuple(map(grown, self.backward, other.backward)),
        )


def microbatch_memory(traces: ModelTraces) -> MicrobatchMemory:
    """Return the memory of one micro-batch that runs forward and backward through all layers alone.

    Results that layers share for a micro-batch, and weight gradients, are not counted: a stage of some of the
    layers needs at least the differences of these figures.
    """
    ledger, layers = MemoryLedger(), range(len(traces.layers))
    alone = replace(traces, layers=[*map(_smaller, traces.layers)], shared=[{} for _ in layers])
    inputs = [MemoryBlock(0, Category.BATCH) for _ in traces.inputs]
    account = ActivationAccount(ledger, ReceiveBufferAccount(ledger, []), {0: layers}, alone, inputs)
    handlers = account.handlers()
    _run(handlers, TakeBatch(_FORWARD))
    kept, seen = [0], set[MemoryBlock]()
    for layer in layers:
        _run(handlers, RunLayer(_FORWARD, layer))
        new = {block for block in ledger.holdings.get(("run", (0, 0, layer)), ()) if block not in seen}
        seen |= new
        kept.append(kept[-1] + sum(block.nbytes for block in new))
    output = ledger.total - kept[-1]
    _run(handlers, ComputeLoss(_FORWARD))
    _run(handlers, SeedGradient(_INPUTS))
    backward = []
    for layer in reversed(layers):
        ledger.reset_peaks()
        _run(handlers, RunLayer(_INPUTS, layer))
        backward.append(ledger.most)
        _run(handlers, RunLayer(_WEIGHTS, layer))
    return MicrobatchMemory(tuple(kept), output, tuple(reversed(backward)))


def _run(handlers: Mapping[type, Callable[[Any], None]], instruction: Instruction) -> None:
    handlers[type(instruction)](instruction)


def _smaller(trace: Trace) -> Trace:
    """Return the trace of the backward with the smaller peak: the whole one, or that split in I and W."""
    backward, whole = trace.backward, trace.whole_backward_peak
    return (
        trace if whole is None else replace(trace, backward=replace(backward, peak=min(backward.peak, whole)))
    )
