"""Programs: the lowered form of a schedule, one flat list of small instructions per rank.

A compute instruction names one layer of one stage, so what happens between layers (gather, reduce, release)
is an instruction of its own, at its position in the list. `verb` names an instruction in profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from plait.schedules.action import Action


@dataclass(frozen=True)
class ActionInstruction:
    """Base class of the instructions that belong to an action (such as `2F0`) of the schedule."""

    verb: ClassVar[str] = ""
    action: Action


@dataclass(frozen=True)
class UnitInstruction:
    """Base class of instructions for a unit: a layer's own parameters, or a parameter that layers share."""

    verb: ClassVar[str] = ""
    unit: str


class TakeBatch(ActionInstruction):
    """Feed micro-batch `action.microbatch` of this rank's batch to the first stage."""

    verb = "take"


@dataclass(frozen=True)
class PostReceive(ActionInstruction):
    """Start receiving the input of `action` from `peer`, a rank of the `pp` axis."""

    verb = "receive"
    peer: int


@dataclass(frozen=True)
class AwaitReceive(ActionInstruction):
    """Wait for the input of `action` from `peer` and pass it to the stage."""

    verb = "await"
    peer: int


class LocalTransfer(ActionInstruction):
    """Pass the result of the previous (`F`) or next (`I`) stage on the same rank to this stage, uncopied."""

    verb = "transfer"


@dataclass(frozen=True)
class Send(ActionInstruction):
    """Start sending the result of `action` to `peer`, a rank of the `pp` axis."""

    verb = "send"
    peer: int


@dataclass(frozen=True)
class RunLayer(ActionInstruction):
    """Run one layer of the stage, forward or backward: `F`, `I`, `W` or `B`, the kind of `action`."""

    layer: int


class ComputeLoss(ActionInstruction):
    """Compute the loss of the micro-batch, at the end of the last stage's forward."""


class KeepOutput(ActionInstruction):
    """Keep the last stage's output for the caller, at the end of a forward without targets."""

    verb = "keep"


class SeedGradient(ActionInstruction):
    """Start a micro-batch's backward, on the last stage, with the gradient of the global mean loss."""

    verb = "seed"


class ReleaseBuffers(ActionInstruction):
    """Free the receive buffers of `action.microbatch` on `action.stage`: no later action needs them."""

    verb = "release"


class GatherParameters(UnitInstruction):
    """Start the all-gather of a unit's parameters over `shard_cp`."""

    verb = "gather"


class AwaitParameters(UnitInstruction):
    """Wait for the all-gather of a unit's parameters."""

    verb = "await"


class ReleaseParameters(UnitInstruction):
    """Free the whole parameters of a unit; this rank's shard stays."""

    verb = "release"


class AllocateGradient(UnitInstruction):
    """Allocate the whole gradient of a unit, filled with zeros."""

    verb = "allocate"


class ScatterGradient(UnitInstruction):
    """Start the reduce-scatter of a unit's whole gradient over `shard_cp`."""

    verb = "scatter"


class AwaitScatter(UnitInstruction):
    """Wait for this rank's shard of a unit's gradient, and free the whole gradient."""

    verb = "collect"


class ReduceGradient(UnitInstruction):
    """Start the all-reduce of a unit's final gradient or shard over the ranks that hold the same one."""

    verb = "reduce"


@dataclass(frozen=True)
class Finish:
    """Last instruction of a step: wait for all sends and reductions that are still pending."""

    verb: ClassVar = "finish"


Instruction: TypeAlias = ActionInstruction | UnitInstruction | Finish
Program: TypeAlias = tuple[Instruction, ...]
INSTRUCTION_TYPES: tuple[type[Instruction], ...] = (
    *ActionInstruction.__subclasses__(),
    *UnitInstruction.__subclasses__(),
    Finish,
)
"""The class of each instruction."""
