"""A step of one rank, rehearsed: its program runs, and a ledger is kept of what it would hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from plait.blueprint import Blueprint, span
from plait.footprint.flow import FlowAccount
from plait.footprint.layers import Traces
from plait.footprint.ledger import Block, Category, Ledger, Moment
from plait.footprint.messages import MessageAccount
from plait.footprint.report import RankMemory
from plait.footprint.units import UnitAccount, buffers_of
from plait.layers.precision import DTYPES
from plait.pipeline.executor import Executor
from plait.schedules.program import Instruction, Program, RunLayer

Watcher = Callable[[int, Moment], None]
"""Told the rank, and what it holds after each instruction of the rehearsed step."""


def rehearse(
    drawn: Blueprint,
    rank: int,
    program: Program,
    traces: Traces | None,
    device: torch.device,
    moments: int,
    watcher: Watcher | None = None,
) -> RankMemory:
    """What a rank of `pp` that computes on `device` holds in its second step.

    What the first one makes, receive buffers say, is there then. Without `traces` nothing is known of what
    flows. `moments` are the tensors of the optimizer's state a parameter.
    """
    ledger = Ledger()
    spans = {stage: span(stage, drawn.counts) for stage in drawn.order.stages_of(rank)}
    layers = [layer for stage in spans.values() for layer in stage]
    units = UnitAccount(ledger, buffers_of(drawn, spans, device), moments)
    ledger.hold("buffers", [Block(_buffer_bytes(drawn, layers), Category.PARAMETERS)])
    handlers = [_nothing(), units.handlers()]
    if traces is not None:
        inputs = _hold_batch(ledger, drawn, spans, traces, device)
        handlers.append(_flow(ledger, drawn, spans, traces, inputs).handlers())
    executor = Executor(*handlers)
    executor.run(program)
    ledger.begin()
    units.begin()

    def observe(instruction: Instruction) -> None:
        ledger.mark(instruction)
        if watcher is not None:
            watcher(rank, ledger.moment(instruction))

    executor.observer = observe
    executor.run(program)
    assert ledger.peak is not None
    for batch in ("inputs", "targets"):
        ledger.drop(batch)
    return RankMemory(
        rank=rank,
        peak=ledger.peak.total,
        at_peak=ledger.peak.held,
        at=_described(ledger.peak.after, drawn),
        most=ledger.most,
        at_rest=ledger.moment(program[-1]).total,
        host=ledger.host_peak,
    )


def _buffer_bytes(drawn: Blueprint, layers: Iterable[int]) -> int:
    """What these layers keep beside parameters."""
    modules = (drawn.sequence.layers[layer].module for layer in layers)
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    told = DTYPES[drawn.plan.precision]
    return sum(
        buffer.numel() * (told if told and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in buffers.values()
    )


def _hold_batch(
    ledger: Ledger, drawn: Blueprint, spans: Mapping[int, range], traces: Traces, device: torch.device
) -> list[Block]:
    """The first stage reads inputs, the last targets; where layers run on the CPU, all is there anyway."""
    count, last = drawn.plan.microbatches, len(drawn.counts) - 1
    inputs = [Block(count * nbytes, Category.BATCH) for nbytes in traces.inputs]
    targets = [Block(count * nbytes, Category.BATCH) for nbytes in traces.targets]
    everywhere = device.type == "cpu"
    ledger.hold("inputs", inputs if everywhere or 0 in spans else [])
    ledger.hold("targets", targets if everywhere or last in spans else [])
    return inputs


def _flow(
    ledger: Ledger,
    drawn: Blueprint,
    spans: Mapping[int, range],
    traces: Traces,
    inputs: Sequence[Block],
) -> FlowAccount:
    ends = {stage: span(stage, drawn.counts)[-1] for stage in range(len(drawn.counts))}
    messages = MessageAccount(ledger, {stage: traces.infos[end].tensors for stage, end in ends.items()})
    stages = {stage: [traces.layers[layer] for layer in layers] for stage, layers in spans.items()}
    return FlowAccount(ledger, messages, stages, traces, inputs)


def _nothing() -> Mapping[type, Callable[[Any], None]]:
    return {kind: lambda _: None for kind in get_args(Instruction)}


def _described(instruction: Instruction, drawn: Blueprint) -> str:
    """The instruction as a few words."""
    name = type(instruction).__name__
    if isinstance(instruction, RunLayer):
        action = instruction.action
        layer = drawn.sequence.layers[span(action.stage, drawn.counts)[instruction.layer]]
        return f"{action} of layer {layer.path}" if layer.path else str(action)
    about = getattr(instruction, "action", getattr(instruction, "unit", ""))
    return f"{name}({about})"
