"""Programs: the lowered form of a schedule, one flat list of small instructions per rank.

A compute instruction names one layer of one stage, so what happens between layers (gather, reduce, release)
is an instruction of its own, at its position in the list. `verb` names an instruction in profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from plait.schedules.action import Action


@dataclass(frozen=True, slots=True)
class TakeBatch:
    """Feed micro-batch `action.microbatch` of this rank's batch to the first stage."""

    verb: ClassVar = "take"
    action: Action


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Start receiving the input of `action` from `peer`, a rank of the `pp` axis."""

    verb: ClassVar = "receive"
    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class AwaitReceive:
    """Wait for the input of `action` from `peer` and pass it to the stage."""

    verb: ClassVar = "await"
    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class LocalTransfer:
    """Pass the result of the previous (`F`) or next (`I`) stage on this rank on to this stage, not copied."""

    verb: ClassVar = "transfer"
    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending the result of `action` to `peer`, a rank of the `pp` axis."""

    verb: ClassVar = "send"
    action: Action
    peer: int


@dataclass(frozen=True, slots=True)
class RunLayer:
    """Run `F`, `I`, `W` or `B` of one layer, by its index within the stage."""

    verb: ClassVar = ""
    action: Action
    layer: int


@dataclass(frozen=True, slots=True)
class ComputeLoss:
    """Compute the loss of the micro-batch, at the end of the last stage's forward."""

    verb: ClassVar = ""
    action: Action


@dataclass(frozen=True, slots=True)
class KeepOutput:
    """Keep the last stage's output for the caller, at the end of a forward without targets."""

    verb: ClassVar = "keep"
    action: Action


@dataclass(frozen=True, slots=True)
class SeedGradient:
    """Start the last stage's backward with the gradient of the global mean loss."""

    verb: ClassVar = "seed"
    action: Action


@dataclass(frozen=True, slots=True)
class ReleaseBuffers:
    """Free the buffers of `action.microbatch` on `action.stage`: no later action needs them."""

    verb: ClassVar = "release"
    action: Action


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Start the all-gather of a unit's parameters over `shard`."""

    verb: ClassVar = "gather"
    unit: str


@dataclass(frozen=True, slots=True)
class AwaitParameters:
    """Wait for the all-gather of a unit's parameters."""

    verb: ClassVar = "await"
    unit: str


@dataclass(frozen=True, slots=True)
class ReleaseParameters:
    """Free the whole parameters of a unit; this rank's shard stays."""

    verb: ClassVar = "release"
    unit: str


@dataclass(frozen=True, slots=True)
class AllocateGradient:
    """Allocate the whole gradient of a unit, filled with zeros."""

    verb: ClassVar = "allocate"
    unit: str


@dataclass(frozen=True, slots=True)
class ScatterGradient:
    """Start the reduce-scatter of a unit's whole gradient over `shard`."""

    verb: ClassVar = "scatter"
    unit: str


@dataclass(frozen=True, slots=True)
class AwaitScatter:
    """Wait for this rank's shard of a unit's gradient, and free the whole gradient."""

    verb: ClassVar = "collect"
    unit: str


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Start the all-reduce of a unit's final gradient over the ranks with the same parameters or shard."""

    verb: ClassVar = "reduce"
    unit: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for every send and reduction in flight."""

    verb: ClassVar = "finish"


Instruction: TypeAlias = (
    TakeBatch
    | PostReceive
    | AwaitReceive
    | LocalTransfer
    | Send
    | RunLayer
    | ComputeLoss
    | KeepOutput
    | SeedGradient
    | ReleaseBuffers
    | GatherParameters
    | AwaitParameters
    | ReleaseParameters
    | AllocateGradient
    | ScatterGradient
    | AwaitScatter
    | ReduceGradient
    | Finish
)
Program: TypeAlias = tuple[Instruction, ...]
