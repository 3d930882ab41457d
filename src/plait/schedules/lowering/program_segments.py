"""Segments of a program: consecutive instructions with one purpose, and a name for it in profiles.

    take 0F0 │ 0F0 0F0 0F0 │ send 0F0 │ … │ await 0I0 │ 0B0 0B0 0B0 │ reduce head │ release 0B0 │ finish

A segment that computes or sends is named after its action, one that receives or awaits after the action that
needs the message, one that moves parameters or gradients after their unit.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from plait.schedules.action import Action
from plait.schedules.lowering.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    Instruction,
    Program,
    RunLayer,
    SeedGradient,
    UnitInstruction,
)


class Segment(NamedTuple):
    """Consecutive instructions of a program that serve one purpose, such as one action or one message."""

    name: str
    instructions: Program
    computes: Action | None
    """The action that the segment computes, or a piece of."""
    awaits: Action | None
    """The action for whose message from another rank the segment waits."""
    within: Action | None = None
    """The action whose first computing segment is this or an earlier one, and whose last this or a later."""


def segments_of(program: Program) -> tuple[Segment, ...]:
    """Divide `program` into segments (instructions with one purpose), and return these in order."""
    segments = [_segment(name, tuple(same)) for name, same in groupby(program, _name)]
    computing: dict[Action, list[int]] = {}
    for position, segment in enumerate(segments):
        if isinstance(segment.instructions[0], RunLayer | ComputeLoss):
            computing.setdefault(segment.instructions[0].action, []).append(position)
    for action, positions in computing.items():
        for position in range(positions[0], positions[-1] + 1):
            segments[position] = segments[position]._replace(within=action)
    return tuple(segments)


def _name(instruction: Instruction) -> str:
    if isinstance(instruction, Finish):
        return instruction.verb
    if isinstance(instruction, UnitInstruction):
        return f"{instruction.verb} {instruction.unit or 'the model'}"
    return f"{instruction.verb} {instruction.action}".lstrip()


def _segment(name: str, instructions: Program) -> Segment:
    first = instructions[0]
    computes = first.action if isinstance(first, RunLayer | ComputeLoss | SeedGradient) else None
    return Segment(name, instructions, computes, first.action if isinstance(first, AwaitReceive) else None)
