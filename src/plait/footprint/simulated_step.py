"""A simulated step of one rank: its program runs on a ledger that records the memory of each allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

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
"""Called with the rank and its memory after each instruction of the simulated step."""


def simulate_step(
    blueprint: Blueprint,
    rank: int,
    program: Program,
    traces: ModelTraces | None,
    device: torch.device,
    moments: int,
    observer: MemoryObserver | None = None,
) -> RankMemory:
    """Return the memory in the second step of a rank of `pp` with layers on `device`.

    What the first step leaves allocated, such as receive buffers, is included. Without `traces` activations
    are not. `moments`: tensors of optimizer state per parameter.
    """
    ledger = MemoryLedger()
    spans = {stage: blueprint.stage_layers[stage] for stage in blueprint.schedule.stages_of(rank)}
    layers = [layer for stage in spans.values() for layer in stage]
    units = ParameterAccount(ledger, rank_buffers(blueprint, spans, device), moments)
    ledger.hold("buffers", [MemoryBlock(_buffer_bytes(blueprint, layers), Category.PARAMETERS)])
    handlers = [dict.fromkeys(get_args(Instruction), _ignore), units.handlers()]
    if traces is not None:
        handlers.append(_activations(ledger, blueprint, spans, traces, device).handlers())
    Executor(*handlers).run(program)
    ledger.reset_peaks()
    units.begin()

    def observe(instruction: Instruction) -> None:
        ledger.record(instruction)
        if observer is not None:
            observer(rank, ledger.snapshot(instruction))

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
        at_rest=ledger.snapshot(program[-1]).total,
        host=ledger.host_peak,
    )


def _buffer_bytes(blueprint: Blueprint, layers: Iterable[int]) -> int:
    """Return the bytes of the buffers (not parameters) of the modules in `layers`."""
    modules = (blueprint.sequence.layers[layer].module for layer in layers)
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    precision = DTYPES[blueprint.plan.precision]
    return sum(
        buffer.numel() * (precision if precision and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in buffers.values()
    )


def _activations(
    ledger: MemoryLedger,
    blueprint: Blueprint,
    spans: Mapping[int, range],
    traces: ModelTraces,
    device: torch.device,
) -> ActivationAccount:
    """Record the batch in the ledger, and return the account of activations.

    The first stage reads inputs and the last one targets; where layers run on the CPU every rank has both.
    """
    count, last = blueprint.plan.microbatches, len(blueprint.stage_layers) - 1
    inputs = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.inputs]
    targets = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.targets]
    everywhere = device.type == "cpu"
    ledger.hold("inputs", inputs if everywhere or 0 in spans else [])
    ledger.hold("targets", targets if everywhere or last in spans else [])
    crossing = [[traces.infos[layers[-1]].tensors] for layers in blueprint.stage_layers]
    stages = {stage: [traces.layers[layer] for layer in layers] for stage, layers in spans.items()}
    return ActivationAccount(ledger, ReceiveBufferAccount(ledger, crossing), stages, traces, inputs)


def _ignore(instruction: Instruction) -> None:
    pass


def _described(instruction: Instruction, blueprint: Blueprint) -> str:
    """Return a short description of the instruction."""
    name = type(instruction).__name__
    if isinstance(instruction, RunLayer):
        action = instruction.action
        layer = blueprint.sequence.layers[blueprint.stage_layers[action.stage][instruction.layer]]
        return f"{action} of layer {layer.path}" if layer.path else str(action)
    about = getattr(instruction, "action", getattr(instruction, "unit", ""))
    return f"{name}({about})"
