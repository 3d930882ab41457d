"""Lowering pass that inserts the gathers and releases of parameters.

    Gather(0)  Await(0) Gather(1) Run(0) Release(0)  Await(1) Gather(2) Run(1) Release(1) …

The gather of a layer's parameters starts before the previous layer runs, so at most two layers' parameters
are whole at once. `W` needs no parameters: only `F`, `I` and `B` use them. All ranks along `shard` run the
same program, so they gather in the same order and cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.schedules.action import Kind
from plait.schedules.lowering_spec import LayerIndex, LoweringSpec
from plait.schedules.program import (
    AwaitParameters,
    GatherParameters,
    Instruction,
    Program,
    ReleaseParameters,
    RunLayer,
)


def insert_gathers(program: Program, spec: LoweringSpec) -> Program:
    """Return `program` with the parameter gathers and releases of `spec.sharding`."""
    uses = {} if spec.sharding.gathers == "never" else _uses(program, spec)
    if not uses:
        return program
    following = dict(zip(uses, [*list(uses.values())[1:], ()], strict=True))
    whole, awaited = set[str](), set[str]()
    gathered: list[Instruction] = []

    def gather(units: Iterable[str]) -> None:
        gathered.extend(GatherParameters(unit) for unit in units if unit not in whole)
        whole.update(units)

    gather(next(iter(uses.values())))
    for position, instruction in enumerate(program):
        units = uses.get(position, ())
        gathered += (AwaitParameters(unit) for unit in units if unit not in awaited)
        awaited.update(units)
        gather(following.get(position, ()))
        gathered.append(instruction)
        if spec.sharding.gathers == "each use":
            released = [unit for unit in units if unit not in following[position]]
            gathered += (ReleaseParameters(unit) for unit in released)
            whole.difference_update(released)
            awaited.difference_update(released)
    return tuple(gathered)


def _uses(program: Program, spec: LoweringSpec) -> dict[int, tuple[str, ...]]:
    """Return the units that each instruction uses, by the instruction's position."""
    units = spec.units_of_layers()
    uses: dict[int, tuple[str, ...]] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, RunLayer) and instruction.action.kind is not Kind.W:
            needed = units.get(LayerIndex(instruction.action.stage, instruction.layer), ())
            if needed:
                uses[position] = needed
    return uses
