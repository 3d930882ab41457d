"""Where a program reduces the gradients of units: as soon as the last weight gradient has gone into them.

    whole gradients    … Run(W) Reduce …
    sharded            … Open(1) Run(W) Scatter(1) AwaitScatter(2) Reduce(2)  Open(0) Run(W) Scatter(0) …

A scatter sums over `shard` and leaves each rank its piece; a reduction sums what is then left to sum, over
`replicate` and over ranks that hold the same parameter elsewhere. One scatter is under way while the next
layer runs, so at most two layers' whole gradients are there at once, and those of units that several stages
of the rank use: these are reduced after the last micro-batch in any case, because the order in which
micro-batches come to them depends on the schedule. Units that several ranks of the `pp` axis hold are reduced
at the end, in one order for all ranks, so no two ranks wait for each other crosswise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plait.schedules.action import Kind
from plait.schedules.gathering import units_of_layers
from plait.schedules.program import (
    AwaitScatter,
    Instruction,
    OpenGradient,
    Program,
    ReduceGradient,
    RunLayer,
    ScatterGradient,
)
from plait.schedules.shape import Place, Shape, Sharding


def with_reductions(program: Program, shape: Shape, spanning: Collection[str]) -> Program:
    """`program` with the reduction of every unit that its layers use. It trains.

    `spanning` are the units of this rank that other ranks of the `pp` axis hold as well.
    """
    units = units_of_layers(shape.units)
    ends = _ends(program, units, each=shape.sharding.scatters == "each")
    placed = _Placed(shape.sharding, spanning)
    for position, instruction in enumerate(program):
        if isinstance(instruction, RunLayer):
            place = Place(instruction.action.stage, instruction.layer)
            if _adds(instruction.action.kind, shape.sharding):
                placed.open(units.get(place, ()))
            placed.program.append(instruction)
            for unit, final in ends.get(position, ()):
                placed.end(unit, final=final)
        else:
            placed.program.append(instruction)
    placed.settle()
    placed.program += (ReduceGradient(unit) for unit in spanning)
    return tuple(placed.program)


@dataclass
class _Placed:
    """A program as it grows."""

    sharding: Sharding
    spanning: Collection[str]
    program: list[Instruction] = field(default_factory=list)
    opened: set[str] = field(default_factory=set)
    under_way: dict[str, bool] = field(default_factory=dict)
    """The units whose scatter was started, and whether it is the step's last."""

    def open(self, units: Collection[str]) -> None:
        """Before something is added to the gradients of `units`."""
        if not self.sharding.opens:
            return
        for unit in units:
            if unit not in self.opened:
                if unit in self.under_way:
                    self.settle()
                self.program.append(OpenGradient(unit))
                self.opened.add(unit)

    def end(self, unit: str, *, final: bool) -> None:
        """After the last that is added to a unit's gradient, for now or for good (`final`)."""
        if self.sharding.scatters == "never":
            if unit not in self.spanning:
                self.program.append(ReduceGradient(unit))
            return
        before, self.under_way = self.under_way, {unit: final}
        self.program.append(ScatterGradient(unit))
        self.opened.discard(unit)
        self._settle(before)

    def settle(self) -> None:
        """Wait for what is under way."""
        self._settle(self.under_way)
        self.under_way = {}

    def _settle(self, under_way: Mapping[str, bool]) -> None:
        for unit, final in under_way.items():
            self.program.append(AwaitScatter(unit))
            if final and unit not in self.spanning:
                self.program.append(ReduceGradient(unit))


def _adds(kind: Kind, sharding: Sharding) -> bool:
    """Whether an instruction adds to gradients; `I` adds what it need not leave to `W`.

    Where each micro-batch is reduced by itself it leaves all to `W`: sums are then the same in any schedule.
    """
    return kind in (Kind.W, Kind.B) or (kind is Kind.I and sharding.scatters != "each")


def _ends(
    program: Program, units: Mapping[Place, tuple[str, ...]], *, each: bool
) -> dict[int, list[tuple[str, bool]]]:
    """By position, the units to which then all has been added, by one micro-batch or (True) by all."""
    last: dict[str, dict[int, int]] = defaultdict(dict)
    stages: dict[str, set[int]] = defaultdict(set)
    for position, instruction in enumerate(program):
        if isinstance(instruction, RunLayer) and instruction.action.kind in (Kind.W, Kind.B):
            for unit in units.get(Place(instruction.action.stage, instruction.layer), ()):
                last[unit][instruction.action.microbatch] = position
                stages[unit].add(instruction.action.stage)
    ends: dict[int, list[tuple[str, bool]]] = defaultdict(list)
    for unit, positions in last.items():
        final = max(positions.values())
        for position in sorted(set(positions.values())) if each and len(stages[unit]) == 1 else [final]:
            ends[position].append((unit, position == final))
    return ends
