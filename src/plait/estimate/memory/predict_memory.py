"""`memory`: predicts the memory of each rank of a plan, without ranks and without allocating the memory.

The program of a rank runs on a ledger that records each allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from plait.engine.blueprint import Blueprint, KnownParts, build_blueprint
from plait.engine.pipeline.stage_exchange import Crossing
from plait.errors import PlanError
from plait.estimate.memory.activations import ActivationAccount, ReceiveBufferAccount
from plait.estimate.memory.context_parallel_microbatch import as_input_batch
from plait.estimate.memory.graph_pools import PartLedger, pool_bytes, slots_of
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger, MemorySnapshot
from plait.estimate.memory.memory_report import Memory, RankMemory
from plait.estimate.memory.model_traces import KnownTraces, ModelTraces, trace_model
from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.memory.optimizer_state import OptimizerState, optimizer_state
from plait.estimate.memory.parameters import ParameterAccount, rank_buffers
from plait.estimate.memory.whole_parameter_owners import Moments, require_moments
from plait.plan.argument_checks import require_instance, require_whole
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.accelerator import default_device
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import Instruction, Program, RunLayer
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import StageCut, schedule_and_cut
from plait.tensor.dtypes import DTYPES
from plait.tensor.experts.experts import Experts
from plait.tensor.losses import Loss, cross_entropy
from plait.tensor.microbatches import split
from plait.tensor.nested_values import Value, signature, tensors_of
from plait.tensor.torch_losses import GivenLoss, as_loss

BALANCED_ROUTING = "Routing is assumed to be balanced: each expert computes equally many tokens."


def routing_assumption(model: nn.Module) -> tuple[str, ...]:
    """Return the sentence that balanced routing is assumed, in a tuple; empty for a model without experts."""
    return (BALANCED_ROUTING,) if any(isinstance(one, Experts) for one in model.modules()) else ()


def memory(
    model: nn.Module,
    plan: Plan,
    inputs: Value = None,
    targets: Value = None,
    *,
    loss: GivenLoss = cross_entropy,
    rules: Rules | None = None,
    rows: int | None = None,
    moments: Moments = 2,
    device: torch.device | str | None = None,
) -> Memory:
    """Return the bytes that each rank of `plan` would allocate for `model`, during a step and between steps.

    `inputs` and `targets` are one data-parallel rank's share of a batch, as `Engine.forward_backward` takes
    it, in whole sequences; tensors on meta will do. Packed documents count as those of the first micro-batch,
    where their ids are on meta as whole sequences. Without `inputs`, a model that has a `context`, as
    plait's own have, is assumed to get `rows` full sequences of tokens (default: one a micro-batch); for
    other models no activations are counted. Without `targets` there is a class for each row of the output.
    `moments`: how many tensors of a parameter's size the optimizer keeps for it: 2 for AdamW, 1 for SGD with
    momentum. For `plait.Muon`, or "muon", that is 1 for hidden matrices and 2 for others, with the buffers
    of their exchanges; for a `partial` of `plait.Owned` the owners' whole parameters, the state of the class
    for them, which a step of each shape on the meta device shows, and buffers. `device` is where layers run,
    by default CUDA where that is available; on a GPU a `torch.nn.RMSNorm` of an eager layer keeps less than
    on a CPU.

    Layers run once, on the meta device, and ranks do not communicate. Not counted: temporaries of the
    optimizer's step, memory of communication backends, and fragmentation. Gradients of an earlier step are
    gone, as after `zero_grad()`. A loss that does not run on meta is assumed to copy its input; attention
    inside `nn.MultiheadAttention` counts with its matrix of weights, and recurrent layers as PyTorch composes
    them. Experts are assumed to get equally many tokens; where `plan.ep` is above 1,
    `Memory.worst` is for one rank that gets all. Compiled layers count as their graphs do without
    generated code, which allocates less within a graph; one whose graphs do not run on meta counts as an
    eager layer. CUDA graphs count with a pool for each slot, which holds what a micro-batch takes at a stage
    at most. Raises PlanError, ModelError, DataError or ScheduleError, as `parallelize` and the first step
    would.
    """
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    return MemoryEstimator(model, inputs, targets, as_loss(loss), rules, rows, moments, device).estimate(plan)


@dataclass
class MemoryEstimator:
    """Predicts the memory of several plans for one model; its fields are the other arguments of `memory`.

    Plans that share schedules or the shapes of layers share their simulation.
    """

    model: nn.Module
    inputs: Value = None
    targets: Value = None
    loss: Loss = cross_entropy
    rules: Rules | None = None
    rows: int | None = None
    moments: Moments = 2
    device: torch.device | str | None = None
    traces: dict[Any, ModelTraces] = field(default_factory=dict)
    layer_traces: dict[Any, KnownTraces] = field(default_factory=dict)
    parts: KnownParts = field(default_factory=KnownParts)
    """What blueprints of the model have in common."""
    records: bool = False
    """Whether traces have the operations of layers, too."""
    order_of: Callable[..., tuple[Schedule, StageCut]] = field(
        default_factory=lambda: cache(schedule_and_cut)
    )

    def __post_init__(self) -> None:
        require_moments(self.moments)
        if self.rows is not None:
            require_whole("rows", self.rows, PlanError)
        if self.rows is not None and self.inputs is not None:
            raise PlanError(f"inputs have rows of their own: give them, or rows = {self.rows}, not both.")

    def estimate(self, plan: Plan) -> Memory:
        """Return the predicted memory of a plan."""
        whole = replace(plan, strategy="none", offload="none", reduce="last")
        unsharded = max(rank.peak for rank in self.ranks(whole))
        traces = self.known_traces(build_blueprint(self.model, plan, self.rules, self.order_of, self.parts))
        attention = () if traces is None else tuple(sorted(traces.attention, key=str))
        worst = None
        if plan.ep > 1 and traces is not None:
            worst = max(rank.most for rank in self.ranks(plan, takes_all=True))
        assumptions = routing_assumption(self.model)
        return Memory(plan, self.ranks(plan), unsharded, traces is not None, attention, assumptions, worst)

    def ranks(
        self, plan: Plan, observer: MemoryObserver | None = None, *, takes_all: bool = False
    ) -> tuple[RankMemory, ...]:
        """Return the predicted memory of each rank of `pp`; calls `observer` after each instruction.

        `takes_all`: of ranks whose experts all tokens of the ranks of `ep` have.
        """
        blueprint = build_blueprint(self.model, plan, self.rules, self.order_of, self.parts)
        traces = self.known_traces(blueprint, takes_all=takes_all)
        state = optimizer_state(blueprint, self.moments)
        return tuple(
            simulate_step(blueprint, rank, program, traces, self.where, state, observer)
            for rank, program in enumerate(lower(blueprint.schedule, blueprint.lowering_spec))
        )

    def rows_of(self, plan: Plan) -> int | None:
        """Return the rows of a data-parallel rank's batch under `plan`, or None if unknown."""
        batch = self._batch(plan)
        return None if batch is None else next(tensors_of(batch)).shape[0]

    @property
    def where(self) -> torch.device:
        """The device on which the layers would run."""
        if self.device is None:
            return default_device()
        try:
            return torch.device(self.device)
        except (RuntimeError, TypeError):
            raise PlanError(f"device is {self.device!r}: give a torch.device, such as cpu or cuda.") from None

    def _batch(self, plan: Plan) -> Value:
        """Return the inputs on the meta device, or None where their shape is unknown."""
        if self.inputs is not None:
            return as_input_batch(self.inputs, DTYPES[plan.precision])
        context = getattr(self.model, "context", None)
        if context is None:
            return None
        rows = plan.microbatches if self.rows is None else self.rows
        return torch.empty(rows, context, dtype=torch.int64, device="meta")

    def known_traces(self, blueprint: Blueprint, *, takes_all: bool = False) -> ModelTraces | None:
        """Return the traces of all layers and the loss, made once; None if a batch's shape is unknown."""
        plan, batch = blueprint.plan, self._batch(blueprint.plan)
        if batch is None:
            return None
        microbatch = split(batch, plan.microbatches, "inputs")[0]
        on_cpu = self.where.type == "cpu"
        dtypes = tuple((kind.gather, kind.gradient) for kind in blueprint.kinds.values())
        late = blueprint.lowering_spec.adds_late
        degrees = plan.tp, plan.sequence_parallel, plan.cp, plan.context_parallel, plan.context_layout
        float8 = plan.linears, blueprint.keeps_experts_in_float8
        alike = degrees, plan.precision, float8, dtypes, late, plan.loss_rows, bool(plan.compile), on_cpu
        key = alike, (plan.ep, plan.etp, takes_all), signature(microbatch), blueprint.recompute
        if key not in self.traces:
            targets = None
            if self.targets is not None:
                targets = split(self.targets, plan.microbatches, "targets")[0]
            recorder = OperationRecorder(fuses=not on_cpu) if self.records else None
            known = self.layer_traces.setdefault(alike, KnownTraces())
            self.traces[key] = trace_model(
                *(blueprint, microbatch, targets, self.loss, recorder, known),
                takes_all=takes_all,
                on_cpu=on_cpu,
            )
        return self.traces[key]


MemoryObserver = Callable[[int, MemorySnapshot], None]
"""Called with the rank and its memory after each instruction of the simulated step."""


def simulate_step(
    blueprint: Blueprint,
    rank: int,
    program: Program,
    traces: ModelTraces | None,
    device: torch.device,
    state: OptimizerState,
    observer: MemoryObserver | None = None,
) -> RankMemory:
    """Simulate two steps of a rank of `pp`, with layers on `device`; return its memory in the second step.

    What the first step leaves allocated, such as receive buffers, is included. Without `traces` activations
    are not. `state`: what the optimizer keeps.
    """
    ledger = MemoryLedger()
    spans = {stage: blueprint.stage_layers[stage] for stage in blueprint.schedule.stages_of(rank)}
    layers = [layer for stage in spans.values() for layer in stage]
    units = ParameterAccount(ledger, rank_buffers(blueprint, spans, device), state)
    offloads = blueprint.plan.offload == "full" and device.type != "cpu"
    ledger.hold("optimizer", state.blocks_of_owner(rank, offloads=offloads))
    ledger.hold("buffers", [MemoryBlock(_buffer_bytes(blueprint, layers), Category.PARAMETERS)])
    handlers, activations = [units.handlers()], None
    if traces is not None:
        cached = sum(_total(traces.caches[layer] for layer in stage) for stage in spans.values())
        cached += _total(traces.lasting[layer] for stage in spans.values() for layer in stage)
        ledger.hold("caches", [MemoryBlock(cached, Category.PARAMETERS)])
        if blueprint.plan.cuda_graphs and blueprint.plan.tp == blueprint.plan.cp == 1:
            pools = _graph_pools(blueprint, spans, program, traces, device)
            ledger.hold("graphs", [MemoryBlock(pools, Category.ACTIVATIONS)])
            activations = _activations(
                PartLedger(ledger, activations=False), blueprint, spans, traces, device
            )
        else:
            activations = _activations(ledger, blueprint, spans, traces, device)
        handlers.append(activations.handlers())
    before = ledger.holdings
    _run_on_ledger(program, handlers, ledger)
    if observer is not None or ledger.holdings != before:  # else a second step is like the first
        ledger.reset_peaks()
        units.begin()
        if activations is not None:
            activations.begin()
        _run_on_ledger(program, handlers, ledger, partial(observer, rank) if observer else None)
    assert ledger.peak is not None
    ledger.drop("batch")
    return RankMemory(
        rank=rank,
        peak=ledger.peak.total,
        at_peak=ledger.peak.held,
        at=_described(ledger.peak.after, blueprint),
        most=ledger.most,
        at_rest=ledger.snapshot(program[-1]).total,
        host=ledger.host_peak,
    )


def _run_on_ledger(
    program: Program,
    handlers: Iterable[Mapping[type, Callable[[Any], None]]],
    ledger: MemoryLedger,
    observer: Callable[[MemorySnapshot], None] | None = None,
) -> None:
    """Call the handlers of each instruction of a program, and record its memory in the ledger."""
    called: dict[type, list[Callable[[Any], None]]] = {}
    for one in handlers:
        for kind, handler in one.items():
            called.setdefault(kind, []).append(handler)
    for instruction in program:
        for handler in called.get(type(instruction), ()):
            handler(instruction)
        ledger.record(instruction)
        if observer is not None:
            observer(ledger.snapshot(instruction))


def _graph_pools(
    blueprint: Blueprint,
    spans: Mapping[int, range],
    program: Program,
    traces: ModelTraces,
    device: torch.device,
) -> int:
    """Return the bytes of the pools of a rank's CUDA graphs."""

    def account(ledger: MemoryLedger) -> dict[type, Callable[[Any], None]]:
        return dict(_activations(ledger, blueprint, spans, traces, device).handlers())

    crossing = _crossing(blueprint, traces)
    slots = slots_of(program)
    return sum(slots[stage] * pool_bytes(program, stage, account, crossing) for stage in spans)


def _buffer_bytes(blueprint: Blueprint, layers: Iterable[int]) -> int:
    """Return the bytes of the buffers (not parameters) of the modules in `layers`."""
    modules = (blueprint.sequence.layers[layer].module for layer in layers)
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    precision = DTYPES[blueprint.plan.precision]
    return sum(
        buffer.numel() * (precision if precision and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in buffers.values()
    )


def _total(bytes_of_layers: Iterable[Mapping[Any, int]]) -> int:
    """Return the bytes of memory that layers hold, by key; memory that several layers share counts once."""
    found: dict[Any, int] = {}
    for one in bytes_of_layers:
        found |= one
    return sum(found.values())


def _activations(
    ledger: MemoryLedger,
    blueprint: Blueprint,
    spans: Mapping[int, range],
    traces: ModelTraces,
    device: torch.device,
) -> ActivationAccount:
    """Record the batch's memory in the ledger, and return the `ActivationAccount` of a rank's stages.

    The first stage reads inputs and the last one targets; where layers run on the CPU every rank has both,
    and the whole sequences of which it holds parts. These parts are kept between steps.
    """
    count, last = blueprint.plan.microbatches, len(blueprint.stage_layers) - 1
    inputs = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.inputs]
    targets = [MemoryBlock(count * nbytes, Category.BATCH) for nbytes in traces.targets]
    everywhere = device.type == "cpu"
    uncut = [MemoryBlock(count * traces.uncut, Category.BATCH)] if everywhere else []
    here = (inputs if everywhere or 0 in spans else []) + (targets if everywhere or last in spans else [])
    cuts = blueprint.plan.cp > 1
    ledger.hold("shards", here if cuts else [])
    ledger.hold("batch", uncut if cuts else here + uncut)
    messages = ReceiveBufferAccount(ledger, _crossing(blueprint, traces))
    return ActivationAccount(ledger, messages, spans, traces, inputs)


def _crossing(blueprint: Blueprint, traces: ModelTraces) -> Crossing:
    """Return the tensors that stages exchange, with the same shapes for all micro-batches."""
    return [[traces.infos[layers[-1]].tensors] for layers in blueprint.stage_layers]


def _described(instruction: Instruction, blueprint: Blueprint) -> str:
    """Return a short description of `instruction` for reports, such as `2F0 of layer head`."""
    name = type(instruction).__name__
    if isinstance(instruction, RunLayer):
        action = instruction.action
        layer = blueprint.sequence.layers[blueprint.stage_layers[action.stage][instruction.layer]]
        return f"{action} of layer {layer.path}" if layer.path else str(action)
    about = getattr(instruction, "action", getattr(instruction, "unit", ""))
    return f"{name}({about})"
