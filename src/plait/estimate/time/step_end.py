"""The end of a step: gradient sums and the optimizer, from each rank's last action on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.operations import AxisTransfer


class RankWork(NamedTuple):
    """Sizes of a rank's stages on which its gradient sums and optimizer step depend."""

    parameters: float
    """Of the rank's stages, before sharding over data-parallel ranks."""
    layers: int
    window: float
    """Seconds of the backward of a micro-batch on all of the rank's stages, in which sums are hidden."""


def latest_ends(work: Sequence[RankWork], ends: Sequence[float]) -> dict[RankWork, float]:
    """Return the largest of `ends`, one for each rank, for each kind of work."""
    latest: dict[RankWork, float] = {}
    for one, end in zip(work, ends, strict=True):
        latest[one] = max(end, latest.get(one, 0.0))
    return latest


def step_seconds(timer: LayerTimer, latest: Mapping[RankWork, float]) -> float:
    """Return the time of a step from the seconds to the last action of ranks, by their work after it."""
    ends = max(end + gradient_sum_seconds(timer, work) for work, end in latest.items())
    return ends + max(sum(optimizer_seconds(timer, work.parameters, work.layers)) for work in latest)


def gradient_transfers(timer: LayerTimer, count: float, layers: int = 1) -> float:
    """Return the seconds in which `count` parameters' gradients are summed, if nothing hides them.

    Zero where they are summed layer by layer in every backward. Else linear in `count` but for the latency,
    and for the fixed cost of a collective of each of `layers` layers.
    """
    shape, plan, network = timer.shape, timer.shape.plan, timer.network
    if shape.timing.scatters == "each":
        return 0.0
    nbytes = count * shape.kind.reduce.itemsize
    if not shape.kind.sharded:
        kinds = [AxisTransfer("all-reduce", "shard", nbytes), AxisTransfer("all-reduce", "replicate", nbytes)]
    else:
        kinds = [AxisTransfer("reduce-scatter", "shard", nbytes)]
        kinds.append(AxisTransfer("all-reduce", "replicate", nbytes / plan.state_ranks))
    return sum(network.seconds_of_layers(one, layers) for one in kinds)


def gradient_sum_seconds(timer: LayerTimer, work: RankWork) -> float:
    """Return the seconds from a rank's last action until its gradients are summed."""
    seconds = gradient_transfers(timer, work.parameters, work.layers)
    if not timer.hides_gradient_sums:
        return seconds
    # Sums of a layer start with the end of its gradient; those of the last one are never hidden.
    return max(seconds / work.layers, seconds - work.window * (1 - 1 / work.layers))


def optimizer_seconds(timer: LayerTimer, count: float, layers: int = 1) -> tuple[float, float]:
    """Return the seconds of the optimizer's step on `count` parameters of a rank before sharding, and of the
    gathers of parameters that follow, one for each of `layers` layers. Neither falls as `count` grows."""
    shape, plan, hardware = timer.shape, timer.shape.plan, timer.hardware
    ranks, master = plan.state_ranks if shape.kind.sharded else 1, shape.kind.master.itemsize
    # Gradients are read for the norm and for the step; master and two moments read and written.
    nbytes = 2 * shape.gradient_item + 2 * (master + 2 * master) + (shape.item if plan.has_master else 0)
    part = hardware.efficiency
    bandwidth = hardware.memory_bandwidth * part.memory * part.optimizer
    seconds = count / ranks * nbytes / bandwidth
    if not shape.kind.sharded or shape.timing.gathers != "once":
        return seconds, 0.0
    gather = AxisTransfer("all-gather", "shard", count * shape.item)
    return seconds, timer.network.seconds_of_layers(gather, layers)
