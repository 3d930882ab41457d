"""Programs: what a schedule is lowered to. One flat list of small instructions per rank.

A compute instruction names one layer of one stage, so whatever has to happen between layers (gather,
reduce, release) is an instruction of its own that stands at its place in the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from plait.schedules.action import Action


@dataclass(frozen=True, slots=True)
class TakeBatch:
    """The first stage's input: micro-batch `action.microbatch` of this rank's batch."""

    action: Action


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Start receiving what `action` will need from `peer`, a rank of the `pp` axis."""

    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class AwaitReceive:
    """Wait for what `action` needs from `peer` and hand it to the stage."""

    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """The stage before (for a forward) or behind (for a backward) lives on this rank: no message, no copy."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending the result of `action` to `peer`, a rank of the `pp` axis."""

    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class RunLayer:
    """`F`, `I` or `W` of one layer, counted within its stage."""

    action: Action
    layer: int


@dataclass(frozen=True, slots=True)
class ComputeLoss:
    """The last stage's end of a forward: the loss of the micro-batch."""

    action: Action


@dataclass(frozen=True, slots=True)
class KeepOutput:
    """The last stage's end of a forward without targets: the output is kept for the caller."""

    action: Action


@dataclass(frozen=True, slots=True)
class SeedGradient:
    """The last stage's start of a backward: the gradient of the global mean loss."""

    action: Action


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing of `action.microbatch` is needed any more on `action.stage`: give buffers back."""

    action: Action


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Start filling the parameters of a unit from the pieces of all ranks along `shard`."""

    unit: str


@dataclass(frozen=True, slots=True)
class AwaitParameters:
    """Wait until the parameters of a unit are there."""

    unit: str


@dataclass(frozen=True, slots=True)
class ReleaseParameters:
    """The next layers do not need the parameters of a unit: only this rank's piece stays."""

    unit: str


@dataclass(frozen=True, slots=True)
class OpenGradient:
    """Make the whole gradient of a unit, of zeros."""

    unit: str


@dataclass(frozen=True, slots=True)
class ScatterGradient:
    """Start summing the whole gradient of a unit over `shard`, each rank its piece."""

    unit: str


@dataclass(frozen=True, slots=True)
class AwaitScatter:
    """Wait for this rank's piece of a unit's gradient; the whole one is not needed any more."""

    unit: str


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Start summing the gradient of a unit over the ranks that hold the same; it is final on this rank."""

    unit: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for every send and reduction that is still under way."""


Instruction: TypeAlias = (
    TakeBatch
    | PostReceive
    | AwaitReceive
    | HandOver
    | Send
    | RunLayer
    | ComputeLoss
    | KeepOutput
    | SeedGradient
    | Release
    | GatherParameters
    | AwaitParameters
    | ReleaseParameters
    | OpenGradient
    | ScatterGradient
    | AwaitScatter
    | ReduceGradient
    | Finish
)
Program: TypeAlias = tuple[Instruction, ...]
