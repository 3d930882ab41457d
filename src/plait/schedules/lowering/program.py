"""Programs: the lowered form of a schedule, a flat list of small instructions per rank, in segments.

A compute instruction names one layer of one stage, so what happens between layers (gather, reduce, release)
is an instruction of its own, at its position in the list. `verb` names an instruction in profiles.

A program runs segment by segment: consecutive instructions with one purpose, and a name for it in profiles.

    take 0F0 │ 0F0 0F0 0F0 │ send 0F0 │ … │ await 0I0 │ 0B0 0B0 0B0 │ reduce head │ release 0B0 │ finish

A segment that computes or sends is named after its action, one that receives or awaits after the action that
needs the message, one that moves parameters or gradients after their unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import groupby, pairwise, starmap
from typing import ClassVar, NamedTuple, TypeAlias

from plait.plan.parameter_units import UnitTiming
from plait.schedules.action import Action


@dataclass(frozen=True)
class ActionInstruction:
    """Base class of instructions that belong to an action, such as `2F0` (stage, kind, micro-batch)."""

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
    """Pass the result of a neighbour stage on the same rank to this stage, without a copy."""

    verb = "transfer"


@dataclass(frozen=True)
class Send(ActionInstruction):
    """Start sending the result of `action` to `peer`, a rank of the `pp` axis."""

    verb = "send"
    peer: int


@dataclass(frozen=True)
class RunLayer(ActionInstruction):
    """Run a layer of the stage: forward (`F`), input gradient (`I`), weight gradient (`W`), or both (`B`)."""

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
    """Start the all-gather of a unit's parameters over the axes of its shards."""

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
    """Start the reduce-scatter of a unit's whole gradient over the axes of its shards."""

    verb = "scatter"


class AwaitScatter(UnitInstruction):
    """Wait for this rank's shard of a unit's gradient, and free the whole gradient."""

    verb = "collect"


class ReduceGradient(UnitInstruction):
    """Start the all-reduce of a unit's final gradient or shard over the ranks that hold the same one."""

    verb = "reduce"


@dataclass(frozen=True)
class ComputeScales:
    """First instruction of a step with matrices that are gathered in float8: compute a scale for each.

    From its largest value, all-reduced over the ranks that hold parts of it.
    """

    verb: ClassVar = "compute scales"


@dataclass(frozen=True)
class Finish:
    """Last instruction of a step: wait for all sends and reductions that are still pending."""

    verb: ClassVar = "finish"


Instruction: TypeAlias = ActionInstruction | UnitInstruction | ComputeScales | Finish
Program: TypeAlias = tuple[Instruction, ...]
INSTRUCTION_TYPES: tuple[type[Instruction], ...] = (
    *ActionInstruction.__subclasses__(),
    *UnitInstruction.__subclasses__(),
    ComputeScales,
    Finish,
)
"""The class of each instruction."""


class Segment(NamedTuple):
    """Consecutive instructions of a program that serve one purpose, such as one action or one message."""

    name: str
    instructions: Program
    computes: Action | None
    """The action that the segment computes, or a part of."""
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
    if isinstance(instruction, ComputeScales | Finish):
        return instruction.verb
    if isinstance(instruction, UnitInstruction):
        return f"{instruction.verb} {instruction.unit or 'the model'}"
    return f"{instruction.verb} {instruction.action}".lstrip()


def _segment(name: str, instructions: Program) -> Segment:
    first = instructions[0]
    computes = first.action if isinstance(first, RunLayer | ComputeLoss | SeedGradient) else None
    return Segment(name, instructions, computes, first.action if isinstance(first, AwaitReceive) else None)


Place: TypeAlias = tuple[int, int, int]
"""Stage, micro-batch and layer."""


def joined_layers(program: Program, may_join: Callable[[RunLayer], bool]) -> Set[Place]:
    """Return, by stage, micro-batch and layer, the layers that can share an autograd graph with the next.

    `may_join`: whether a layer may share one at all. Two layers can where they follow each other in every
    action that runs them: a graph made in `F` is the one that `I` and `W` go through.
    """
    actions: dict[tuple[int, int], set[Action]] = {}
    alone = set[tuple[int, int]]()
    for one in program:
        if isinstance(one, RunLayer):
            actions.setdefault((one.action.stage, one.action.microbatch), set()).add(one.action)
            if not may_join(one):
                alone.add((one.action.stage, one.layer))
    adjacent = Counter(filter(None, starmap(_place, pairwise(program))))
    return {
        (stage, microbatch, layer)
        for (stage, microbatch, layer), count in adjacent.items()
        if count == len(actions[stage, microbatch]) and alone.isdisjoint([(stage, layer), (stage, layer + 1)])
    }


def in_groups(instructions: Program, joined: Set[Place]) -> Iterator[Program]:
    """Yield `instructions` in groups: consecutive layers that share an autograd graph; all others alone.

    `joined`: the result of `joined_layers`.
    """
    group: list[Instruction] = []
    for one in instructions:
        if group and _place(group[-1], one) not in joined:
            yield tuple(group)
            group = []
        group.append(one)
    if group:
        yield tuple(group)


def _place(one: Instruction, other: Instruction) -> Place | None:
    """Return the place of two neighbour layers that follow each other in an action; None for all else."""
    if not (isinstance(one, RunLayer) and isinstance(other, RunLayer) and one.action == other.action):
        return None
    stage, _, microbatch = one.action
    return (stage, microbatch, min(one.layer, other.layer)) if abs(one.layer - other.layer) == 1 else None


class LayerIndex(NamedTuple):
    """A layer of the model: its stage and its index within the stage."""

    stage: int
    layer: int


@dataclass(frozen=True)
class ExpertExchanges:
    """The layers whose tokens travel to experts on other ranks, and between which ranks."""

    layers: Set[LayerIndex] = frozenset()
    groups: Set[tuple[int, ...]] = frozenset()
    """Of each group of ranks between which experts are divided: the index of each rank's program."""


NO_EXCHANGES = ExpertExchanges()


@dataclass(frozen=True)
class LoweringSpec:
    """What `lower` needs besides the schedule: layers per stage and unit, when to gather and reduce."""

    layers: tuple[int, ...]
    """Number of layers per stage."""
    units: Mapping[str, tuple[LayerIndex, ...]]
    """The layers that use each unit and add to its gradient."""
    overlap: bool | None = None
    """Whether a full backward runs `I` and `W` layer by layer. None: where no rank waits for its result."""
    timings: Mapping[str, UnitTiming] = field(default_factory=dict)
    """When each unit is gathered, released and reduced. Others are neither sharded nor cast."""
    posts_late: bool = False
    """Whether receives are posted one action ahead, for NCCL; else as early as rendezvous sends need it."""
    replicated: bool = True
    """Whether other ranks than those of `pp` may add to the same gradients."""
    loss_computes_logits: bool = False
    """Whether the loss uses the last layer's parameters, and adds to their gradients."""
    exchanges: ExpertExchanges = NO_EXCHANGES
    """Where running a layer exchanges tokens with other ranks."""

    @property
    def last_layer(self) -> LayerIndex:
        """The last layer of the model."""
        return LayerIndex(len(self.layers) - 1, self.layers[-1] - 1)

    def timing_of(self, unit: str) -> UnitTiming:
        """Return when a unit (parameters gathered together) is gathered, released and reduced."""
        return self.timings.get(unit, UnitTiming())

    @property
    def adds_late(self) -> bool:
        """Whether `I` adds no weight gradients, but leaves all to `W`: if some are reduced each micro-batch.

        Sums are then the same in any schedule.
        """
        return any(timing.scatters == "each" for timing in self.timings.values())

    def units_of_layers(self) -> dict[LayerIndex, tuple[str, ...]]:
        """Return for each layer the units (parameters gathered together) that it uses."""
        found: dict[LayerIndex, tuple[str, ...]] = {}
        for unit, layers in self.units.items():
            for layer in layers:
                found[layer] = (*found.get(layer, ()), unit)
        return found
