"""Lowering passes for units: gathers and releases of their parameters, reductions of their gradients.

    Gather(0)  Await(0) Gather(1) Run(0) Release(0)  Await(1) Gather(2) Run(1) Release(1) …

The gather of a layer's parameters starts before the previous layer runs, so at most two layers' parameters
are whole at once. `W` needs no parameters: only `F`, `I` and `B` use them. All ranks of a
stage run the same program, so they gather in the same order and cannot deadlock.

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
from typing import NamedTuple

from plait.schedules.action import Action, Kind
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitParameters,
    AwaitScatter,
    ComputeLoss,
    GatherParameters,
    Instruction,
    KeepOutput,
    LayerIndex,
    LoweringSpec,
    Program,
    ReduceGradient,
    ReleaseParameters,
    RunLayer,
    ScatterGradient,
    SeedGradient,
)


def insert_gathers(program: Program, spec: LoweringSpec) -> Program:
    """Return `program` with inserted gathers and releases of parameters, as `spec.timings` ask for."""
    uses = _uses(program, spec)
    if not uses:
        return program
    following, ahead = _later_uses(uses)
    whole, awaited = set[str](), set[str]()
    gathered: list[Instruction] = []

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
    """Return the training `program` with an inserted gradient reduction for every unit of its layers.

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
        """Append allocations of the gradients of `units` that are not allocated yet."""
        for unit in units:
            if self.spec.timing_of(unit).allocates and unit not in self.allocated:
                if unit in self.in_flight:
                    self.await_scatters()
                self.program.append(AllocateGradient(unit))
                self.allocated.add(unit)

    def end(self, unit: str, *, final: bool) -> None:
        """Append the reduction of a unit's gradient, complete for a micro-batch or (`final`) for the step."""
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
        """Append waits for pending reduce-scatters, and the all-reduces of those gradients that are final."""
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
