"""What the hosts of all ranks of a mesh queue on NCCL, as data: messages, and the collectives of all axes.

The programs of `pp` say when parameters are gathered and gradients reduced; `Workload` says what else a step
queues: the collectives over `tp` within layers and loss, and those around the program, as the engine does it.
`test_mesh_calls` compares it with what a real engine queues.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from plait.engine.blueprint import StepPrograms
from plait.engine.sharding.unit import reduction_ranks
from plait.plan import axes
from plait.plan.parameter_units import UnitTiming
from plait.schedules.action import Kind
from plait.schedules.lowering.check_programs import stream_calls, tied_units
from plait.schedules.lowering.messages import Channel
from plait.schedules.lowering.program import (
    AwaitParameters,
    AwaitScatter,
    ComputeLoss,
    ComputeScales,
    Finish,
    GatherParameters,
    Instruction,
    LayerIndex,
    LoweringSpec,
    Program,
    ReduceGradient,
    ReleaseParameters,
    RunLayer,
    ScatterGradient,
)
from plait.schedules.lowering.stream_replay import (
    Awaited,
    Call,
    Operation,
    Queued,
    Read,
    deadlock_of,
    first_uses,
)
from plait.schedules.schedule import Schedule

Mode: TypeAlias = Literal["train", "evaluate", "generate"]
MODES: tuple[Mode, ...] = ("train", "evaluate", "generate")
SHARDS = "all_gather reduce_scatter"
AGAIN = "+all_gather +reduce_scatter -all_gather -reduce_scatter"
"""Something is gathered again while a gradient is summed."""
WORDS = {
    "none": ("all_reduce", "all_reduce", ""),
    "regather": (SHARDS, AGAIN, "all_gather all_gather"),
}
"""Over `tp`, of a layer's forward, input gradient and weight gradient."""
SHARDINGS = {
    "full": UnitTiming("each use", "each", allocates=True),
    "gradients": UnitTiming("once", "last", allocates=True),
    "optimizer": UnitTiming("once", "last"),
}


class Buffer(NamedTuple):
    """A flat buffer of a unit, with what decides over its collectives."""

    sharded: bool = False
    summands: int = 1
    """Over how many neighbours along `tp` its gradient is summed."""
    trains: bool = True
    of_one_rank: bool = False
    """Whether no other rank has a part of it or a summand of its gradient: experts of ranks along `ep`."""


@dataclass(frozen=True)
class Workload:
    """What a step queues that the programs do not tell. Collectives are words such as `all_reduce`.

    One is started and awaited at once; `+all_reduce` starts it, and `-all_reduce` awaits it; `!all_gather`
    is started and read.
    """

    layers: Callable[[LayerIndex, Kind], str] = lambda layer, kind: ""
    """Collectives over `tp` of a layer's forward, input gradient, weight gradient, or both at once."""
    experts: Callable[[LayerIndex, Kind], str] = lambda layer, kind: ""
    """Likewise over `ep` and `etp`, before those; the host reads what `!all_gather` gives."""
    loss: str = ""
    """Over `tp`, of a micro-batch's loss."""
    buffers: Callable[[str], Sequence[Buffer]] = lambda unit: (Buffer(),)
    sampling: str = ""
    """Over `tp`, of a token, on the ranks of the last stage."""
    norm: str = "model"
    """The axis of the gradient norm."""


class Grid(NamedTuple):
    """The ranks of a mesh, as `reduction_ranks` asks for them."""

    sizes: Mapping[str, int]

    def size(self, axis: str) -> int:
        return axes.size_along(axis, self.sizes)

    def rank_at(self, **coordinate: int) -> int:
        return axes.rank_at(axes.split_dp(coordinate, self.sizes), self.sizes)


class Communicators:
    """Which communicator an operation of a group has, by the rules of torch and of `Mesh`."""

    def __init__(self, sizes: Mapping[str, int], *, device_bound: bool) -> None:
        self.device_bound = device_bound
        self._groups: dict[str, tuple[Hashable, dict[int, tuple[int, ...]]]] = {}
        owners: dict[tuple[tuple[int, ...], ...], str] = {}
        for axis in (*sizes, *axes.combined_axes(sizes)):
            groups = tuple(axes.groups_along(axis, sizes))
            owner = owners.setdefault(groups, axis)  # axes with the same ranks share one
            self._groups[axis] = owner, {rank: ranks for ranks in groups for rank in ranks}
        if "ep" in sizes:
            of_experts = axes.groups_along(("ep", "etp"), sizes)
            self._groups["experts"] = "experts", {rank: ranks for ranks in of_experts for rank in ranks}

    def along(self, axis: str, rank: int) -> tuple[Hashable, tuple[int, ...]]:
        """The communicator of collectives over a rank's group along an axis, and the ranks."""
        owner, groups = self._groups[axis]
        return self.of_collectives((owner, groups[rank])), groups[rank]

    def of_collectives(self, group: Hashable) -> Hashable:
        return group, "all"

    def of_messages(self, group: Hashable, one: int, other: int) -> Hashable:
        """One for each two ranks; the group's own where `init_process_group` was given a `device_id`."""
        return (group, "all") if self.device_bound else (group, min(one, other), max(one, other))


GroupOfChannel: TypeAlias = Callable[[Channel], Hashable]
"""The process group of a channel, among the ranks that differ in their index along `pp` only."""


def own_group(channel: Channel) -> Hashable:
    """As it is."""
    return channel


def group_of_kind(channel: Channel) -> Hashable:
    """As it was: a group of all ranks along `pp` for activations, and one for gradients."""
    return channel[2]


@dataclass
class MeshCalls:
    """The calls of all ranks of a mesh, step after step."""

    sizes: Mapping[str, int]
    programs: StepPrograms
    workload: Workload
    device_bound: bool = False
    group_of_channel: GroupOfChannel = own_group
    calls: list[list[Call]] = field(init=False)

    def __post_init__(self) -> None:
        self.calls = [[] for _ in range(axes.world_size(self.sizes))]
        self._communicators = Communicators(self.sizes, device_bound=self.device_bound)
        self._lines = axes.groups_along("pp", self.sizes)
        self._counts: Counter[tuple[int, Hashable, str]] = Counter()
        self._whole: dict[int, set[str]] = defaultdict(set)
        """By rank, the units whose parameters are whole."""
        self._scaled: set[int] = set()
        """The ranks whose scales are those of the parameters as they are."""
        self._steps = 0
        self._coordinates = [axes.coordinate_of(rank, self.sizes) for rank in range(len(self.calls))]
        self._known_replicas: dict[tuple[tuple[int, ...], int, str], list[tuple[int, ...]]] = {}

    @property
    def connected(self) -> set[Hashable]:
        """The communicators of channels, which are connected when the engine is made."""
        return {
            call.operation.communicator for row in self.calls for call in row if is_message(call.operation)
        }

    def add(self, mode: Mode) -> None:
        """Append a step, with clipping; an evaluation; or two tokens."""
        if mode == "generate":
            self._whole.clear()
            self._scaled.clear()
            for _ in range(2):
                self._run(self.programs.output_of_one)
                for line in self._lines:
                    last = line[self.programs.schedule.rank_of[-1]]
                    self._around(last, "tp", self.workload.sampling, "the token")
                for rank in range(len(self.calls)):
                    self._around(rank, "pp", "broadcast", "the token")
            return
        for rank in range(len(self.calls)):
            self._around(rank, "dp", "all_reduce", "the loss's weight")
        self._whole.clear()
        self._scaled.clear()
        self._run(self.programs.train if mode == "train" else self.programs.evaluate)
        for rank in range(len(self.calls)):
            self._around(rank, "world", "all_reduce", "the mean loss")
            if mode == "train":
                self._around(rank, self.workload.norm, "all_reduce", "the norm")

    def _run(self, programs: Sequence[Program]) -> None:
        """Append what the programs queue, on each line of ranks along `pp`."""
        self._steps += 1
        tied = tied_units(programs)
        for line in self._lines:
            made = _Line(self, line, tied)
            rows = stream_calls(programs, made.communicator_of, made.collectives, line)
            for rank, row in zip(line, rows, strict=True):
                self.calls[rank] += (self._in_this_step(call) for call in row)

    def _in_this_step(self, call: Call) -> Call:
        """Messages have the same names in every step."""
        operation = call.operation
        if not is_message(operation):
            return call
        return type(call)(operation._replace(name=f"{operation.name} of run {self._steps}"))

    def _around(self, rank: int, axis: str, text: str, what: str) -> None:
        self.calls[rank] += self.collectives(rank, axis, text, what)

    def collectives(self, rank: int, axis: str, text: str, what: str) -> Iterator[Call]:
        """The calls of the words in `text`, over a rank's group along `axis`."""
        communicator, ranks = self._communicators.along(axis, rank)
        started: dict[str, Operation] = {}
        for word in text.split() if len(ranks) > 1 else ():
            kind = word.lstrip("+-!")
            if not word.startswith("-"):
                started[kind] = self.operation(rank, communicator, ranks, f"{kind} of {what}")
                yield Queued(started[kind])
            if not word.startswith("+"):
                yield (Read if word.startswith("!") else Awaited)(started[kind])

    def operation(self, rank: int, communicator: Hashable, ranks: tuple[int, ...], name: str) -> Operation:
        """The next operation of this name on a rank's communicator."""
        self._counts[rank, communicator, name] += 1
        return Operation(communicator, ranks, f"{name} ({self._counts[rank, communicator, name]})")

    def replicas(
        self, rank: int, buffer: Buffer, stages: tuple[int, ...] | None
    ) -> tuple[Hashable, tuple[int, ...]]:
        """The communicator and the ranks of an all-reduce of a buffer that `stages` have, or this rank's."""
        axis = "replicate" if buffer.sharded else "dp"
        if stages is None and buffer.summands == 1:
            return self._communicators.along(axis, rank)
        together = (self._coordinates[rank]["pp"],) if stages is None else stages
        ranks = next(one for one in self._replicas(together, buffer.summands, axis) if rank in one)
        return self._communicators.of_collectives(("copies" if stages is None else "tie", ranks)), ranks

    def _replicas(self, stages: tuple[int, ...], summands: int, axis: str) -> list[tuple[int, ...]]:
        key = stages, summands, axis
        if key not in self._known_replicas:
            made = reduction_ranks([stages], summands, Grid(self.sizes), axis)  # type: ignore[arg-type]
            self._known_replicas[key] = list(map(tuple, made))
        return self._known_replicas[key]


class _Line:
    """The ranks that differ in their index along `pp` only, and what they queue besides messages."""

    def __init__(self, mesh: MeshCalls, line: tuple[int, ...], tied: Mapping[str, tuple[int, ...]]) -> None:
        self.mesh, self.line, self.tied = mesh, line, tied
        self.gathering: dict[tuple[int, str], list[Operation]] = {}
        self.scattering: dict[tuple[int, str], list[Operation]] = {}
        self.reducing: dict[int, list[Operation]] = defaultdict(list)

    def communicator_of(self, channel: Channel) -> Hashable:
        group = "messages", self.line, self.mesh.group_of_channel(channel)
        return self.mesh._communicators.of_messages(group, channel[0], channel[1])

    def collectives(self, index: int, instruction: Instruction) -> Iterator[Call]:
        """What the rank at an index of the line queues in an instruction."""
        rank, workload = self.line[index], self.mesh.workload
        match instruction:
            case RunLayer(action, layer):
                place = LayerIndex(action.stage, layer)
                words = workload.layers(place, action.kind)
                if exchanges := workload.experts(place, action.kind):
                    yield from self.mesh.collectives(
                        rank, "experts", exchanges, f"tokens of {action}.{layer}"
                    )
                yield from self.mesh.collectives(rank, "tp", words, f"{action}.{layer}")
            case ComputeLoss(action):
                yield from self.mesh.collectives(rank, "tp", workload.loss, f"the loss {action.microbatch}")
            case ComputeScales() if rank not in self.mesh._scaled:
                self.mesh._scaled.add(rank)
                for axis in ("shard", "tp"):
                    yield from self.mesh.collectives(rank, axis, "all_reduce", "the scales")
            case GatherParameters(unit) if unit not in self.mesh._whole[rank]:
                self.mesh._whole[rank].add(unit)
                yield from self._start(rank, unit, "all_gather", self.gathering)
            case AwaitParameters(unit):
                yield from map(Awaited, self.gathering.pop((rank, unit), ()))
            case ReleaseParameters(unit):
                self.mesh._whole[rank].discard(unit)
            case ScatterGradient(unit):
                yield from self._start(rank, unit, "reduce_scatter", self.scattering)
            case AwaitScatter(unit):
                yield from map(Awaited, self.scattering.pop((rank, unit), ()))
            case ReduceGradient(unit):
                yield from self._reduce(rank, unit)
            case Finish():
                yield from map(Awaited, self.reducing.pop(rank, ()))

    def _start(
        self, rank: int, unit: str, kind: str, started: dict[tuple[int, str], list[Operation]]
    ) -> Iterator[Call]:
        """Start a collective over `shard` for each buffer; gradients are those of buffers that train."""
        communicator, ranks = self.mesh._communicators.along("shard", rank)
        started[rank, unit] = [
            self.mesh.operation(rank, communicator, ranks, f"{kind} of {unit}")
            for buffer in self.mesh.workload.buffers(unit)
            if buffer.sharded and not buffer.of_one_rank
            if (buffer.trains or kind == "all_gather") and len(ranks) > 1
        ]
        yield from map(Queued, started[rank, unit])

    def _reduce(self, rank: int, unit: str) -> Iterator[Call]:
        for buffer in self.mesh.workload.buffers(unit):
            communicator, ranks = self.mesh.replicas(rank, buffer, self.tied.get(unit))
            if buffer.trains and len(ranks) > 1 and not buffer.of_one_rank:
                operation = self.mesh.operation(rank, communicator, ranks, f"all_reduce of {unit}")
                self.reducing[rank].append(operation)
                yield Queued(operation)


def is_message(operation: Operation) -> bool:
    """Whether an operation of `MeshCalls` goes from one rank to another."""
    return operation.name[0].isdigit()


def mesh_of_schedule(
    made: Schedule, *, tp: int, shard: int, replicate: int, sharding: str, words: str, **options: Any
) -> MeshCalls:
    """A step, an evaluation and two tokens, on a model whose first and last layer share a parameter."""
    sharded, stages = shard > 1, made.stages
    units: dict[str, tuple[LayerIndex, ...]] = {f"layer {n}": (LayerIndex(n, 0),) for n in range(stages)}
    units["tie"] = LayerIndex(0, 0), LayerIndex(stages - 1, 0)
    timing = SHARDINGS[sharding] if sharded else UnitTiming()
    spec = LoweringSpec((1,) * stages, units, timings=dict.fromkeys(units, timing))
    forward, backward, weight = WORDS[words]
    of_layer = {Kind.F: forward, Kind.I: backward, Kind.W: weight, Kind.B: f"{backward} {weight}"}
    buffers = Buffer(sharded), Buffer(sharded, summands=tp)
    workload = Workload(
        layers=lambda at, kind: of_layer[kind],
        loss="all_reduce all_reduce",
        buffers=lambda unit: buffers[: 1 if unit == "tie" else 2],
        sampling="all_gather",
        norm="world" if sharded else "model",
    )
    sizes = axes.sizes_of(pp=made.ranks, dp=shard * replicate, tp=tp, replicate=replicate)
    mesh = MeshCalls(sizes, StepPrograms(made, spec).posting_late(), workload, **options)
    for mode in MODES:
        mesh.add(mode)
    return mesh


def deadlock_in(mesh: MeshCalls) -> str | None:
    """Of streams, or of hosts, where only the channels are connected."""
    return deadlock_of(mesh.calls) or deadlock_of(first_uses(mesh.calls, mesh.connected))
