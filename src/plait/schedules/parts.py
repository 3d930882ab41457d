"""Parts of a program: consecutive instructions with one purpose, under a name that says which.

    take 0F0 │ 0F0 0F0 0F0 │ send 0F0 │ … │ await 0I0 │ 0B0 0B0 0B0 │ reduce head │ release 0B0 │ finish

What computes bears the name of its action, and what sends its result too; what receives and awaits bears that
of the action that needs it; what moves parameters or gradients that of their unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from plait.schedules.action import Action
from plait.schedules.program import (
    AwaitParameters,
    AwaitReceive,
    AwaitScatter,
    ComputeLoss,
    Finish,
    GatherParameters,
    HandOver,
    Instruction,
    KeepOutput,
    OpenGradient,
    PostReceive,
    Program,
    ReduceGradient,
    Release,
    ReleaseParameters,
    RunLayer,
    ScatterGradient,
    SeedGradient,
    Send,
    TakeBatch,
)

_VERBS: Mapping[type, str] = {
    TakeBatch: "take",
    PostReceive: "receive",
    AwaitReceive: "await",
    HandOver: "hand over",
    Send: "send",
    RunLayer: "",
    ComputeLoss: "",
    KeepOutput: "keep",
    SeedGradient: "seed",
    Release: "release",
    GatherParameters: "gather",
    AwaitParameters: "await",
    ReleaseParameters: "release",
    OpenGradient: "open",
    ScatterGradient: "scatter",
    AwaitScatter: "collect",
    ReduceGradient: "reduce",
    Finish: "finish",
}


class Part(NamedTuple):
    """Consecutive instructions, by what they are for."""

    name: str
    instructions: Program
    computes: Action | None
    """What is computed here, or a piece of it."""
    awaits: Action | None
    """For which action's input from another rank it is waited here."""
    within: Action | None = None
    """Which action lasts from before, or from here, until here or later."""


def parts_of(program: Program) -> tuple[Part, ...]:
    """`program` in its parts, in order."""
    parts = [_part(name, tuple(same)) for name, same in groupby(program, _name)]
    pieces: dict[Action, list[int]] = {}
    for place, part in enumerate(parts):
        if isinstance(part.instructions[0], RunLayer | ComputeLoss):
            pieces.setdefault(part.instructions[0].action, []).append(place)
    for action, places in pieces.items():
        for place in range(places[0], places[-1] + 1):
            parts[place] = parts[place]._replace(within=action)
    return tuple(parts)


def _name(instruction: Instruction) -> str:
    verb = _VERBS[type(instruction)]
    if isinstance(instruction, Finish):
        return verb
    unit = getattr(instruction, "unit", None)
    subject = str(instruction.action) if unit is None else unit or "the model"  # type: ignore[union-attr]
    return f"{verb} {subject}" if verb else subject


def _part(name: str, instructions: Program) -> Part:
    first = instructions[0]
    computes = first.action if isinstance(first, RunLayer | ComputeLoss | SeedGradient) else None
    return Part(name, instructions, computes, first.action if isinstance(first, AwaitReceive) else None)
