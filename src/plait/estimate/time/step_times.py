"""`StepTimes`: the times of a step: its actions by event simulation, then gradient sums and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

from plait.estimate.time.layer_times import HOST_LINK, LayerTimer, Parts, PassTimes
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.estimate.time.operation_times import AxisTransfer
from plait.estimate.time.whole_parameter_updates import StageOwners, owner_seconds
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.plan.decoder_sizes import LayerKind
from plait.plan.plan import Plan, Recompute
from plait.schedules.action import Kind
from plait.schedules.costs import Costs
from plait.schedules.event_simulation import Timing, simulate_shared
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell

T = TypeVar("T")
HOST_BANDWIDTH = 50e9
"""Bytes a second that a rank's optimizer reads and writes on the host; assumed: no hardware file has it."""


class StepEndSizes(NamedTuple):
    """What a rank's gradient sums and optimizer step depend on, such as its number of parameters."""

    parameters: float
    """Of the rank's stages, before sharding over data-parallel ranks."""
    layers: int
    window: float
    """Seconds of the backward of a micro-batch on all of the rank's stages, in which sums are hidden."""
    experts: float = 0.0
    """How many of the parameters belong to experts that the plan divides."""


def latest_ends(work: Sequence[StepEndSizes], ends: Sequence[float]) -> dict[StepEndSizes, float]:
    """Return by work after the last action the latest of the `ends` of the ranks that have this work."""
    latest: dict[StepEndSizes, float] = {}
    for one, end in zip(work, ends, strict=True):
        latest[one] = max(end, latest.get(one, 0.0))
    return latest


def step_seconds(timer: LayerTimer, latest: Mapping[StepEndSizes, float]) -> float:
    """Return a step's seconds, given the latest end of last actions by the work that follows on a rank."""
    ends = max(end + gradient_sum_seconds(timer, work) for work, end in latest.items())
    return ends + max(
        sum(optimizer_seconds(timer, work.parameters, work.layers, work.experts)) for work in latest
    )


def gradient_transfers(timer: LayerTimer, count: float, layers: int = 1, experts: float = 0.0) -> float:
    """Return the seconds to sum the gradients of `count` parameters over ranks, if nothing overlaps.

    `experts`: how many of them belong to experts that the plan divides. Zero where gradients are summed layer
    by layer in every backward. Else linear in both numbers but for the latency, and for the fixed cost of a
    collective of each of `layers` layers.
    """
    shape, network = timer.shape, timer.network
    if shape.timing.scatters == "each":
        return 0.0
    kinds = []
    for axis, ranks, number, _ in timer.parts(count, experts):
        nbytes = number * shape.kind.reduce.itemsize
        kinds.append(AxisTransfer("reduce-scatter" if shape.kind.sharded else "all-reduce", axis, nbytes))
        kinds.append(AxisTransfer("all-reduce", "replicate", nbytes / ranks))
    return sum(network.seconds_of_layers(one, layers) for one in kinds)


def gradient_sum_seconds(timer: LayerTimer, work: StepEndSizes) -> float:
    """Return the seconds from a rank's last action until its gradients are summed."""
    seconds = gradient_transfers(timer, work.parameters, work.layers, work.experts)
    if not timer.hides_gradient_sums:
        return seconds
    # Sums of a layer start with the end of its gradient; those of the last one are never hidden.
    return max(seconds / work.layers, seconds - work.window * (1 - 1 / work.layers))


def optimizer_seconds(
    timer: LayerTimer, count: float, layers: int = 1, experts: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of the optimizer's step on a rank, and of the gathers of parameters that follow.

    `count`: the rank's parameters before sharding, of which `experts` belong to experts that the plan
    divides; `layers`: one gather for each. Neither falls as numbers grow.
    """
    shape, kind, hardware = timer.shape, timer.shape.kind, timer.hardware
    master, item = kind.master.itemsize, shape.gathered_item()
    # Gradients are read for the norm and for the step; master and moments read and written.
    nbytes = 2 * shape.gradient_item + 2 * (1 + shape.moments) * master + (item if kind.has_master else 0)
    part = hardware.efficiency
    bandwidth = hardware.memory_bandwidth * part.memory * part.optimizer
    parts = timer.parts(count, experts)
    updated = sum(part.elements / part.ranks for part in parts)
    seconds = updated * nbytes / bandwidth
    if kind.offloads_gradients and hardware.overlaps:  # gradients go to the host, parameters come back
        moved = kind.reduce.itemsize + item
        seconds = updated * (nbytes / HOST_BANDWIDTH + moved / HOST_LINK)
    if not kind.sharded or shape.timing.gathers != "once":
        return seconds, 0.0
    gathers = (AxisTransfer("all-gather", part.axis, part.elements * part.item) for part in parts)
    return seconds, sum(timer.network.seconds_of_layers(one, layers) for one in gathers)


NANOSECOND = 1e-9
"""Times of actions are whole multiples of it, so that the simulation is exact."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step: its actions by event simulation, then gradient sums and the optimizer."""

    timer: LayerTimer
    schedule: Schedule
    stages: Sequence[Sequence[LayerKind]]
    """The kinds of each stage's layers."""
    modes: Sequence[Sequence[Recompute]]
    owners: Sequence[StageOwners] = ()
    """What owners of whole parts do on each rank of `pp`; empty for optimizers without any."""

    @cached_property
    def owner_seconds(self) -> tuple[float, float]:
        """Seconds of updating whole parameters (Muon), and of their exchange, on the slowest stage."""
        return max((owner_seconds(self.timer, one) for one in self.owners), key=sum, default=(0.0, 0.0))

    @cached_property
    def passes(self) -> tuple[PassTimes, ...]:
        """The times of each stage for one micro-batch; equal layers and equal stages are timed once."""
        known: dict[tuple[object, bool], PassTimes] = {}
        found = []
        for number, (kinds, modes) in enumerate(zip(self.stages, self.modes, strict=True)):
            counts = Counter(zip(kinds, modes, strict=True))
            stage = frozenset(counts.items()), hides_sums(self.timer.shape, self.schedule, number)
            if stage not in known:
                total = PassTimes(Parts(), Parts(), Parts())
                for kind, count in counts.items():
                    total = total + self.timer.times(*kind, at_once=stage[1]).times(count)
                known[stage] = total
            found.append(known[stage])
        return tuple(found)

    def _executed(self, schedule: Schedule) -> Schedule:
        """Return the schedule as ranks run it: where input gradients are sent first, backwards are split."""
        return schedule.split_backward if self.timer.shape.plan.sends_inputs_first else schedule

    @property
    def costs(self) -> Costs:
        """The costs of actions and messages, in nanoseconds."""
        timing = self.timing(self.timer.message_seconds)
        durations = timing.durations
        return Costs(
            F=durations[Kind.F],
            I=durations[Kind.I],
            W=durations[Kind.W],
            comm=max((*timing.forward_hops, *timing.backward_hops)),
        )

    def timeline(self) -> Timeline:
        """Return the simulated actions with their times in nanoseconds."""
        schedule, timing = self._executed(self.schedule), self.timing(self.timer.message_seconds)
        found = simulate(schedule, self.costs)
        if self.timer.speedup == 1:
            return found
        shared = simulate_shared(schedule.event_order, timing, self.timer.speedup)
        cells = tuple(
            tuple(Cell(action, round(start), round(end)) for action, start, end in zip(*row, strict=True))
            for row in zip(schedule.actions, *shared, strict=True)
        )
        return replace(found, tick=Fraction(1), cells=cells, hop=max(timing.forward_hops))

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """Seconds from the start of the step to each rank's last action."""
        return self.ends_with(self.timer.message_seconds)

    def ends_with(self, hop: float) -> tuple[float, ...]:
        """Return the seconds to each rank's last action if a message takes `hop` seconds."""
        return tuple(end * NANOSECOND for end in self.last_ends(self.schedule, self.timing(hop)))

    def last_ends(self, schedule: Schedule, timing: Timing) -> Sequence[float]:
        """Return the nanoseconds from the step's start to each rank's last action of `schedule`."""
        order = self._executed(schedule).event_order
        if self.timer.speedup == 1:
            return order.last_ends(timing)
        return [ends[-1] for ends in simulate_shared(order, timing, self.timer.speedup).ends]

    def timing(self, hop: float) -> Timing:
        """Return the durations of actions and messages in nanoseconds; a message takes `hop` seconds."""
        forward = [_whole(one.forward.total) for one in self.passes]
        inputs = [_whole(one.inputs.total) for one in self.passes]
        weights = [_whole(one.weights.total) for one in self.passes]
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        hops = [0 if here == there else _whole(hop) for here, there in pairwise(self.schedule.rank_of)]
        durations = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}
        return Timing(durations, [0, *hops], [*hops, 0])

    @cached_property
    def work(self) -> tuple[StepEndSizes, ...]:
        """For each rank the sizes on which its time after the last action depends."""
        sizes: dict[tuple[tuple[LayerKind, ...], ...], tuple[float, float]] = {}
        found = []
        for rank in range(self.schedule.ranks):
            own = self.schedule.stages_of(rank)
            kinds = tuple(tuple(self.stages[stage]) for stage in own)
            if kinds not in sizes:
                shape, all_kinds = self.timer.shape, [*chain(*kinds)]
                sizes[kinds] = shape.trained_parameters(all_kinds), shape.expert_parameters(all_kinds)
            window = sum(self.passes[stage].backward for stage in own)
            parameters, experts = sizes[kinds]
            found.append(StepEndSizes(parameters, sum(map(len, kinds)), window, experts))
        return tuple(found)

    @cached_property
    def latest(self) -> Mapping[StepEndSizes, float]:
        """The latest end of last actions, in seconds, of the ranks with equal work after it, by that work."""
        return latest_ends(self.work, self.ends)

    @cached_property
    def seconds(self) -> float:
        """The seconds of the step, with gradient sums and the optimizer."""
        return step_seconds(self.timer, self.latest) + sum(self.owner_seconds)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by use (products, attention, bubble, …), on the rank whose actions end last."""
        plan = self.timer.shape.plan
        sums = [gradient_sum_seconds(self.timer, work) for work in self.work]
        after = [
            optimizer_seconds(self.timer, work.parameters, work.layers, work.experts) for work in self.work
        ]
        last = max(range(plan.pp), key=lambda rank: self.ends[rank] + sums[rank])
        slowest = max(after, key=sum)
        owning, exchanges = self.owner_seconds
        parts = Parts()
        for stage in self.schedule.stages_of(last):
            parts = parts + self.passes[stage].total
        parts = parts.times(plan.microbatches * self._busy(last))
        waiting = self.ends[last] - parts.total
        without = self.ends_with(0.0)[last] if self.timer.message_seconds else self.ends[last]
        pp = min(max(self.ends[last] - without, 0.0), max(waiting, 0.0))
        return {
            "matrix products": parts.products,
            "attention": parts.attention,
            "element-wise": parts.elementwise,
            "recomputation": parts.recomputation,
            "tp communication": parts.tp,
            "cp communication": parts.cp,
            "ep communication": parts.ep,
            "pp communication": pp,
            "dp communication": parts.dp + sums[last] + slowest[1] + exchanges,
            "bubble": waiting - pp,
            "optimizer": slowest[0] + owning,
            "host overhead": parts.host,
        }

    def _busy(self, rank: int) -> float:
        """Return a rank's computing time as a fraction of what it would be if no other rank ever waited."""
        if self.timer.speedup == 1:
            return 1.0
        order, timing = self._executed(self.schedule).event_order, self.timing(self.timer.message_seconds)
        shared, alike = (simulate_shared(order, timing, speedup) for speedup in (self.timer.speedup, 1.0))
        return shared.busy(rank) / alike.busy(rank)


def hides_sums(shape: MicrobatchSizes, schedule: Schedule, stage: int) -> bool:
    """Return whether weight gradients of a stage's layers overlap all-reduces over `tp`."""
    sends = schedule.exchanges_before(stage)
    return not schedule.splits and shape.plan.weights_at_once(sends=sends)


def _whole(seconds: float) -> int:
    return round(seconds / NANOSECOND)


def stage_modes(plan: Plan, cut: Sequence[int]) -> tuple[tuple[Recompute, ...], ...]:
    """Return the recompute mode of each layer of each stage."""
    modes = plan.recompute if isinstance(plan.recompute, tuple) else (plan.recompute,) * sum(cut)
    return _by_stage(modes, cut)


def stage_kinds(kinds: Sequence[LayerKind], cut: Sequence[int]) -> tuple[tuple[LayerKind, ...], ...]:
    """Return the kinds of each stage's layers; `cut` has the number of layers of each stage."""
    return _by_stage(kinds, cut)


def _by_stage(layers: Sequence[T], cut: Sequence[int]) -> tuple[tuple[T, ...], ...]:
    return tuple(tuple(layers[first:stop]) for first, stop in pairwise(accumulate(cut, initial=0)))
