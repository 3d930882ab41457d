"""Lowering: from a schedule (stage actions) to one program per rank (instructions).

What is added, and where:

- around each action: where its input comes from (batch, message, same rank) and where its result goes;
- inside each action: one instruction per layer, forwards in model order, backwards in reverse. A full
  backward whose result is sent runs all of its `I` first, then sends, then runs its `W`; one whose result no
  rank waits for runs both layer by layer, so that `W` can hide the communication of `I`;
- the receives of messages are posted ahead, in the order of sending (see `messages`);
- gathers and releases of the parameters of units, reductions of their gradients.

    Gather(0)  Await(0) Gather(1) Run(0) Release(0)  Await(1) Gather(2) Run(1) Release(1) …

The gather of a layer's parameters starts before the previous layer runs, so at most two layers' parameters
are whole at once. `W` needs no parameters: only `F`, `I` and `B` use them. All ranks of a
stage run the same program, so they gather in the same order and cannot deadlock. Scales of matrices that are
gathered in float8 are computed once, at the start: parameters do not change within a step.

Reductions come directly after the last weight gradient of a unit:

    whole gradients    … Run(W) Reduce …
    sharded            … Allocate(1) Run(W) Scatter(1) AwaitScatter(2) Reduce(2)  Allocate(0) Run(W) …

A scatter sums over the axes that a unit is sharded over and leaves each rank its shard; a reduction sums what
is then left to sum, over other ranks with the same shard. A scatter overlaps with the next layer, so at most
two layers' whole gradients exist at once, and those of units that several stages of the rank use. The latter
are reduced after the last micro-batch in any case, because the order in which their gradients accumulate
depends on the schedule. Tied units, which several ranks of the `pp` axis use, are reduced at the end, in one
order on all ranks, so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from plait.plan.plan import weights_at_once
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.messages import AT_START, Inbox, StageMessage, inboxes
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitParameters,
    AwaitReceive,
    AwaitScatter,
    ComputeLoss,
    ComputeScales,
    Finish,
    GatherParameters,
    Instruction,
    KeepOutput,
    LayerIndex,
    LocalTransfer,
    LoweringSpec,
    PostReceive,
    Program,
    ReduceGradient,
    ReleaseBuffers,
    ReleaseParameters,
    RunLayer,
    ScatterGradient,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.schedule import Schedule

Ending = Literal["loss", "output"]


def lower(schedule: Schedule, spec: LoweringSpec, ending: Ending = "loss") -> tuple[Program, ...]:
    """Return one program (instructions) per rank of `pp`; `ending`: compute the loss or keep the output."""
    return tuple(
        _lower_rank(schedule, spec, ending, rank, inbox)
        for rank, inbox in enumerate(inboxes(schedule, late=spec.posts_late))
    )


def _lower_rank(schedule: Schedule, spec: LoweringSpec, ending: Ending, rank: int, inbox: Inbox) -> Program:
    program: list[Instruction] = [_post(message) for message in inbox.get(AT_START, ())]
    for position, action in enumerate(schedule.actions[rank]):
        program += _input_of(action, schedule)
        program += map(_post, inbox.get(position, ()))
        program += _lower_action(action, schedule, spec, ending)
    lowered = tuple(program)
    if schedule.trains:
        ranks_of = {
            unit: {schedule.rank_of[layer.stage] for layer in layers} for unit, layers in spec.units.items()
        }
        tied = [unit for unit, ranks in ranks_of.items() if rank in ranks and len(ranks) > 1]
        lowered = insert_reductions(lowered, spec, tied)
    return (*insert_gathers(lowered, spec), Finish())


def _post(message: StageMessage) -> PostReceive:
    return PostReceive(message.consumer, message.sender)


def _lower_action(
    action: Action, schedule: Schedule, spec: LoweringSpec, ending: Ending
) -> list[Instruction]:
    stage, kind = action.stage, action.kind
    if kind is Kind.F:
        lowered: list[Instruction] = [RunLayer(action, layer) for layer in range(spec.layers[stage])]
        if stage + 1 == schedule.stages:
            lowered.append(ComputeLoss(action) if ending == "loss" else KeepOutput(action))
        lowered += _sends(action, schedule)
    else:
        lowered = _backward(action, schedule, spec)
    if kind in (Kind.W, Kind.B) or not schedule.trains:
        lowered.append(ReleaseBuffers(action))
    return lowered


def _backward(action: Action, schedule: Schedule, spec: LoweringSpec) -> list[Instruction]:
    """Return a backward's instructions; `spec.overlap` decides if `B` runs per layer or all `I` first."""
    sends = _sends(action, schedule)
    layerwise = weights_at_once(spec.overlap, sends=bool(sends))
    first, *later = [action]
    if action.kind is Kind.B and not layerwise:
        first, later = action.message_key, [action._replace(kind=Kind.W)]
    layers = range(spec.layers[action.stage])[::-1]
    lowered: list[Instruction] = [RunLayer(first, layer) for layer in layers]
    lowered += sends
    lowered += (RunLayer(second, layer) for second in later for layer in layers)
    return lowered


def _sends(action: Action, schedule: Schedule) -> list[Send]:
    consumer = action.consumer(schedule.stages)
    if consumer is None or schedule.rank_of[consumer.stage] == schedule.rank_of[action.stage]:
        return []
    return [Send(action.message_key, schedule.rank_of[consumer.stage])]


def _input_of(action: Action, schedule: Schedule) -> list[Instruction]:
    if action.kind is Kind.W:
        return []
    source, key = action.source_stage(schedule.stages), action.message_key
    if source is None:
        return [TakeBatch(action) if action.kind is Kind.F else SeedGradient(key)]
    owner = schedule.rank_of[source]
    local = owner == schedule.rank_of[action.stage]
    return [LocalTransfer(key) if local else AwaitReceive(key, owner)]


def insert_gathers(program: Program, spec: LoweringSpec) -> Program:
    """Return `program` with instructions that gather parameters before their use and release them after."""
    uses = _uses(program, spec)
    if not uses:
        return program
    following, ahead = _later_uses(uses)
    whole, awaited = set[str](), set[str]()
    scales = any(spec.timing_of(unit).scales for use in uses.values() for unit in use.units)
    gathered: list[Instruction] = [ComputeScales()] if scales else []

    def gather(units: Iterable[str]) -> None:
        gathered.extend(GatherParameters(unit) for unit in units if unit not in whole)
        whole.update(units)

    gather(next(iter(uses.values())).units)
    for position, instruction in enumerate(program):
        units = uses[position].units if position in uses else ()
        gathered += (AwaitParameters(unit) for unit in units if unit not in awaited)
        awaited.update(units)
        gather(ahead.get(position, ()))
        gathered.append(instruction)
        released = [
            unit
            for unit in units
            if unit not in following[position] and spec.timing_of(unit).gathers == "each use"
        ]
        gathered += (ReleaseParameters(unit) for unit in released)
        whole.difference_update(released)
        awaited.difference_update(released)
    return tuple(gathered)


class _Use(NamedTuple):
    """An instruction's use of parameters: the units, and the layer and action for which it needs them."""

    units: tuple[str, ...]
    layer: LayerIndex
    action: Action


def _uses(program: Program, spec: LoweringSpec) -> dict[int, _Use]:
    """Return the uses of gathered parameters in a program, by the position of the instruction."""
    gathered = {
        layer: used
        for layer, units in spec.units_of_layers().items()
        if (used := tuple(unit for unit in units if spec.timing_of(unit).gathers != "never"))
    }
    uses: dict[int, _Use] = {}
    for position, instruction in enumerate(program):
        layer, action = _layer_of(instruction, spec)
        if layer in gathered and action is not None and action.kind is not Kind.W:
            uses[position] = _Use(gathered[layer], layer, action.message_key)
    return uses


def _later_uses(uses: Mapping[int, _Use]) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """Return, by position of a use, the units of the next use, and of the next by another layer or action.

    The second are gathered during the use, for example while the loss computes its logits.
    """
    following: dict[int, tuple[str, ...]] = {}
    ahead: dict[int, tuple[str, ...]] = {}
    later: _Use | None = None
    other: tuple[str, ...] = ()
    for position, use in reversed(list(uses.items())):
        if later is not None and later[1:] != use[1:]:
            other = later.units
        following[position], ahead[position] = later.units if later else (), other
        later = use
    return following, ahead


def _layer_of(instruction: Instruction, spec: LoweringSpec) -> tuple[LayerIndex | None, Action | None]:
    """Return the layer whose parameters `instruction` uses, and its action; (None, None) if it uses none."""
    if isinstance(instruction, RunLayer):
        return LayerIndex(instruction.action.stage, instruction.layer), instruction.action
    if spec.loss_computes_logits and isinstance(instruction, ComputeLoss | KeepOutput | SeedGradient):
        return spec.last_layer, instruction.action
    return None, None


def insert_reductions(program: Program, spec: LoweringSpec, tied: Collection[str]) -> Program:
    """Return the training `program` with instructions that reduce the gradients its layers compute.

    `tied` are the units of this rank that other ranks of the `pp` axis use too.
    """
    units = spec.units_of_layers()
    ends = _ends(program, spec)
    builder = _ReductionBuilder(spec, tied)
    for position, instruction in enumerate(program):
        layer, action = _layer_of(instruction, spec)
        if layer in units and action is not None and _accumulates(action.kind, spec):
            builder.allocate(units[layer])
        builder.program.append(instruction)
        for unit, final in ends.get(position, ()):
            builder.end(unit, final=final)
    builder.await_scatters()
    builder.program += map(ReduceGradient, [*builder.late, *tied])
    return tuple(builder.program)


@dataclass
class _ReductionBuilder:
    spec: LoweringSpec
    tied: Collection[str]
    program: list[Instruction] = field(default_factory=list)
    allocated: set[str] = field(default_factory=set)
    in_flight: dict[str, bool] = field(default_factory=dict)
    """The units whose scatter has started, and whether it is the step's last."""
    late: list[str] = field(default_factory=list)
    """The units whose reduction sends nothing, so it need not start early: layers may then run together."""

    def allocate(self, units: Collection[str]) -> None:
        """Append instructions to allocate the gradients of units (parameters) that are not allocated."""
        for unit in units:
            if self.spec.timing_of(unit).allocates and unit not in self.allocated:
                if unit in self.in_flight:
                    self.await_scatters()
                self.program.append(AllocateGradient(unit))
                self.allocated.add(unit)

    def end(self, unit: str, *, final: bool) -> None:
        """Append the reduction of a unit's gradient, after a micro-batch's or (`final`) the last backward."""
        if self.spec.timing_of(unit).scatters == "never":
            if not self.spec.replicated and unit not in self.tied:
                self.late.append(unit)
            elif unit not in self.tied:
                self.program.append(ReduceGradient(unit))
            return
        self.program.append(ScatterGradient(unit))
        self.allocated.discard(unit)
        self.await_scatters()
        self.in_flight = {unit: final}

    def await_scatters(self) -> None:
        """Append waits for the started reduce-scatters, and all-reduces of gradients then complete."""
        for unit, final in self.in_flight.items():
            self.program.append(AwaitScatter(unit))
            if final and unit not in self.tied:
                self.program.append(ReduceGradient(unit))
        self.in_flight = {}


def _accumulates(kind: Kind, spec: LoweringSpec) -> bool:
    """Return whether `kind` adds weight gradients: `W` and `B` do; `I` too, unless it leaves all to `W`."""
    return kind in (Kind.W, Kind.B) or (kind is Kind.I and not spec.adds_late)


def _ends(program: Program, spec: LoweringSpec) -> dict[int, list[tuple[str, bool]]]:
    """Return the units to reduce after each instruction, by position; True: for the last time in the step."""
    units = spec.units_of_layers()
    last: dict[str, dict[int, int]] = defaultdict(dict)
    stages: dict[str, set[int]] = defaultdict(set)
    for position, instruction in enumerate(program):
        if isinstance(instruction, RunLayer) and instruction.action.kind in (Kind.W, Kind.B):
            for unit in units.get(LayerIndex(instruction.action.stage, instruction.layer), ()):
                last[unit][instruction.action.microbatch] = position
                stages[unit].add(instruction.action.stage)
    ends: dict[int, list[tuple[str, bool]]] = defaultdict(list)
    for unit, positions in last.items():
        final = max(positions.values())
        each = spec.timing_of(unit).scatters == "each" and len(stages[unit]) == 1
        for position in sorted(set(positions.values())) if each else [final]:
            ends[position].append((unit, position == final))
    return ends
