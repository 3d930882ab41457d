"""A step of one rank, rehearsed: its program runs, and a ledger is kept of what it would hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from plait.blueprint import Blueprint
from plait.footprint.activations import ActivationAccount
from plait.footprint.layer_traces import ModelTraces
from plait.footprint.memory_ledger import Category, MemoryBlock, MemoryLedger, MemorySnapshot
from plait.footprint.memory_report import RankMemory
from plait.footprint.parameters import ParameterAccount, rank_buffers
from plait.footprint.receive_buffers import ReceiveBufferAccount
from plait.layers.precision import DTYPES
from plait.pipeline.executor import Executor
from plait.schedules.program import Instruction, Program, RunLayer

MemoryObserver = Callable[[int, MemorySnapshot], None]
"""Told the rank, and what it holds after each instruction of the rehearsed step."""


def simulate_step(
    blueprint: Blueprint,
    rank: int,
    program: Program,
    traces: ModelTraces | None,
    device: torch.device,
    moments: int,
    watcher: MemoryObserver | None = None,
) -> RankMemory:
    """What a rank of `pp` that computes on `device` holds in its second step.

    What the first one makes, receive buffers say, is there then. Without `traces` nothing is known of what
    flows. `moments` are the tensors of the optimizer's state a parameter.
    """
    ledger = MemoryLedger()
    spans = {stage: blueprint.stage_layers[stage] for stage in blueprint.schedule.stages_of(rank)}
    layers = [layer for stage in spans.values() for layer in stage]
    units = ParameterAccount(ledger, rank_buffers(blueprint, spans, device), moments)
    ledger.hold("buffers", [MemoryBlock(_buffer_bytes(blueprint, layers), Category.PARAMETERS)])
    handlers = [_nothing(), units.handlers()]
    if traces is not None:
        inputs = _hold_batch(ledger, blueprint, spans, traces, device)
        handlers.append(_flow(ledger, blueprint, spans, traces, inputs).handlers())
    Executor(*handlers).run(program)
    ledger.begin()
    units.begin()

    def observe(instruction: Instruction) -> None:
        ledger.mark(instruction)
        if watcher is not None:
            watcher(rank, ledger.moment(instruction))

    Executor(*handlers, dict.fromkeys(get_args(Instruction), observe)).run(program)
    assert ledger.peak is not None
    for batch in ("inputs", "targets"):
        ledger.drop(batch)
    return RankMemory(
        rank=rank,
        peak=ledger.peak.total,
        at_peak=ledger.peak.held,
        at=_described(ledger.peak.after, blueprint),
        most=ledger.most,
        at_rest=ledger.moment(program[-1]).total,
        host=ledger.host_peak,
    )


def _buffer_bytes(blueprint: Blueprint, layers: Iterable[int]) -> int:
    """What these layers keep beside parameters."""
    modules = (blueprint.sequence.layers[layer].module for layer in layers)
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    told = DTYPES[blueprint.plan.precision]
    return sum(
        buffer.numel() * (told if told and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in buffers.values()
    )


def _hold_batch(
    ledger: MemoryLedger,
    blueprint: Blueprint,
    spans: Mapping[int, range],
    traces: ModelTraces,
    device: torch.device,
) -> list[MemoryBlock]:
    """The first stage reads inputs, the last targets; where layers run on the CPU, all is there anyway."""
    count, last = blueprint.plan.microbatches, len(blueprint.layers_per_stage) - 1
    inputs = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.inputs]
    targets = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.targets]
    everywhere = device.type == "cpu"
    ledger.hold("inputs", inputs if everywhere or 0 in spans else [])
    ledger.hold("targets", targets if everywhere or last in spans else [])
    return inputs


def _flow(
    ledger: MemoryLedger,
    blueprint: Blueprint,
    spans: Mapping[int, range],
    traces: ModelTraces,
    inputs: Sequence[MemoryBlock],
) -> ActivationAccount:
    crossing = [[traces.infos[layers[-1]].tensors] for layers in blueprint.stage_layers]
    messages = ReceiveBufferAccount(ledger, crossing)
    stages = {stage: [traces.layers[layer] for layer in layers] for stage, layers in spans.items()}
    return ActivationAccount(ledger, messages, stages, traces, inputs)


def _nothing() -> Mapping[type, Callable[[Any], None]]:
    return {kind: lambda _: None for kind in get_args(Instruction)}


def _described(instruction: Instruction, blueprint: Blueprint) -> str:
    """The instruction as a few words."""
    name = type(instruction).__name__
    if isinstance(instruction, RunLayer):
        action = instruction.action
        layer = blueprint.sequence.layers[blueprint.stage_layers[action.stage][instruction.layer]]
        return f"{action} of layer {layer.path}" if layer.path else str(action)
    about = getattr(instruction, "action", getattr(instruction, "unit", ""))
    return f"{name}({about})"
