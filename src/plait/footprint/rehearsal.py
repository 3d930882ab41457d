"""A step of one rank, rehearsed: its program runs, and a ledger is kept of what it would hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from plait.blueprint import Blueprint, span
from plait.footprint.flow import FlowAccount
from plait.footprint.layers import Traces
from plait.footprint.ledger import Block, Category, Ledger, Moment
from plait.footprint.messages import MessageAccount
from plait.footprint.units import UnitAccount
from plait.pipeline.executor import Executor
from plait.pipeline.precision import DTYPES
from plait.schedules.program import Instruction, Program

Watcher = Callable[[Moment], None]
"""Told of what is held after each instruction of the rehearsed step."""


@dataclass(frozen=True)
class Batch:
    """One data-parallel rank's share of a batch: the bytes of each tensor."""

    inputs: Sequence[int] = ()
    targets: Sequence[int] = ()


class Rehearsal:
    """The ledger of one rank of `pp`, and the accounts that enter what instructions do."""

    def __init__(
        self,
        drawn: Blueprint,
        rank: int,
        traces: Traces | None,
        batch: Batch,
        device: torch.device,
        moments: int,
    ) -> None:
        """Without `traces` nothing is known of activations, and none are counted."""
        self.ledger = Ledger()
        self._drawn = drawn
        self._spans = {stage: span(stage, drawn.counts) for stage in drawn.order.stages_of(rank)}
        self._units = UnitAccount(self.ledger, self._units_here(), drawn.policy_on(device), moments)
        self.ledger.hold("buffers", [Block(self._buffer_bytes(), Category.PARAMETERS)])
        handlers = [_nothing(), self._units.handlers()]
        if traces is not None:
            handlers.append(self._flow(traces, self._hold_batch(batch, device)).handlers())
        self._executor = Executor(*handlers)

    def run(self, program: Program, watcher: Watcher | None = None) -> None:
        """Rehearse the second step: what the first one makes, receive buffers say, is there already."""
        self._units.begin()
        self._executor.run(program)
        self._units.begin()
        self.ledger.begin()

        def observe(instruction: Instruction) -> None:
            self.ledger.mark(instruction)
            if watcher is not None:
                watcher(self.ledger.moment(instruction))

        self._executor.observer = observe
        self._executor.run(program)

    def _units_here(self) -> Mapping[str, Any]:
        mine = {layer for layers in self._spans.values() for layer in layers}
        sequence = self._drawn.sequence
        used = [name for name, users in sequence.users.items() if mine.intersection(users)]
        names = dict.fromkeys(sequence.unit_of(name) for name in used)
        return {name: self._drawn.arrangement[name] for name in names}

    def _buffer_bytes(self) -> int:
        """What the layers keep beside parameters."""
        dtype = DTYPES[self._drawn.plan.precision]
        layers = (self._drawn.sequence.layers[layer] for layers in self._spans.values() for layer in layers)
        buffers = {id(buffer): buffer for layer in layers for buffer in layer.module.buffers()}
        return sum(
            buffer.numel() * (buffer.dtype if dtype is None or not buffer.is_floating_point() else dtype).itemsize
            for buffer in buffers.values()
        )

    def _hold_batch(self, batch: Batch, device: torch.device) -> list[Block]:
        """The first stage reads inputs, the last targets; where layers run on the CPU, all is there anyway."""
        inputs = [Block(nbytes, Category.BATCH) for nbytes in batch.inputs]
        targets = [Block(nbytes, Category.BATCH) for nbytes in batch.targets]
        everywhere = device.type == "cpu"
        self.ledger.hold("inputs", inputs if everywhere or 0 in self._spans else [])
        last = len(self._drawn.counts) - 1
        self.ledger.hold("targets", targets if everywhere or last in self._spans else [])
        return inputs

    def _flow(self, traces: Traces, inputs: Sequence[Block]) -> FlowAccount:
        counts = self._drawn.counts
        ends = {stage: span(stage, counts)[-1] for stage in range(len(counts))}
        crossing = {stage: traces.infos[end].tensors for stage, end in ends.items()}
        stages = {
            stage: [traces.layers[layer] for layer in layers] for stage, layers in self._spans.items()
        }
        return FlowAccount(self.ledger, MessageAccount(self.ledger, crossing), stages, traces, inputs)


def _nothing() -> Mapping[type, Callable[[Any], None]]:
    return {kind: lambda _: None for kind in get_args(Instruction)}
