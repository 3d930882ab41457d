"""Where a program gathers the parameters of units and lets them go again.

    Gather(0)  Await(0) Gather(1) Run(0) Release(0)  Await(1) Gather(2) Run(1) Release(1) …

The parameters of a layer are asked for while the layer before it runs, so at most two layers' are there at
once. Weight work needs no parameters: only `F`, `I` and `B` use them. All ranks along `shard` run the same
program, so they gather in the same order, and nobody can wait for a gather that another starts later than
something that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait.schedules.action import Kind
from plait.schedules.program import (
    AwaitParameters,
    GatherParameters,
    Instruction,
    Program,
    ReleaseParameters,
    RunLayer,
)
from plait.schedules.shape import Place, Shape


def with_gathers(program: Program, shape: Shape) -> Program:
    """`program` with what fills the parameters of units before a layer runs, as `shape.sharding` says."""
    if shape.sharding.gathers == "never":
        return program
    releases = shape.sharding.gathers == "each use"
    uses = _uses(program, units_of_layers(shape.units))
    if not uses:
        return program
    following = dict(zip(uses, [*list(uses.values())[1:], ()], strict=True))
    held, awaited = set[str](), set[str]()
    gathered: list[Instruction] = []

    def gather(units: Iterable[str]) -> None:
        gathered.extend(GatherParameters(unit) for unit in units if unit not in held)
        held.update(units)

    gather(next(iter(uses.values()), ()))
    for position, instruction in enumerate(program):
        units = uses.get(position, ())
        gathered += (AwaitParameters(unit) for unit in units if unit not in awaited)
        awaited.update(units)
        gather(following.get(position, ()))
        gathered.append(instruction)
        if releases:
            over = [unit for unit in units if unit not in following[position]]
            gathered += (ReleaseParameters(unit) for unit in over)
            held.difference_update(over)
            awaited.difference_update(over)
    return tuple(gathered)


def units_of_layers(units: Mapping[str, tuple[Place, ...]]) -> dict[Place, tuple[str, ...]]:
    """For each layer, the units that it uses."""
    found: dict[Place, tuple[str, ...]] = {}
    for unit, places in units.items():
        for place in places:
            found[place] = (*found.get(place, ()), unit)
    return found


def _uses(program: Program, units: Mapping[Place, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    """By their position, the instructions that need parameters, and the units whose."""
    uses: dict[int, tuple[str, ...]] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, RunLayer) and instruction.action.kind is not Kind.W:
            needed = units.get(Place(instruction.action.stage, instruction.layer), ())
            if needed:
                uses[position] = needed
    return uses
