"""Seconds of collectives: α · steps + bytes · (n − 1) / n / bandwidth, by the links that the axis crosses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plait.estimate.time.hardware import Hardware
from plait.estimate.time.operations import Axis, AxisTransfer
from plait.plan.plan import Plan


@dataclass(frozen=True)
class AxisGroup:
    """Where the ranks of an axis are: `size` ranks, `stride` ranks apart in the world, `tp` innermost."""

    size: int
    stride: int

    def on_host(self, devices: int) -> int:
        """Return how many of the group's ranks share a host of `devices` devices."""
        return max(1, min(self.size, devices // self.stride))


@dataclass(frozen=True)
class Network:
    """Times of the collectives of a plan on given hardware."""

    plan: Plan
    hardware: Hardware

    @cached_property
    def groups(self) -> dict[Axis, AxisGroup]:
        """The group of each axis; ranks are numbered with `tp` innermost, then cp, shard, replicate, pp."""
        plan = self.plan
        strides = {"tp": 1, "cp": plan.tp, "shard": plan.tp * plan.cp}
        replicate = plan.tp * plan.cp * plan.shard
        return {
            "tp": AxisGroup(plan.tp, strides["tp"]),
            "cp": AxisGroup(plan.cp, strides["cp"]),
            "shard": AxisGroup(plan.state_ranks, strides["cp"]),
            "replicate": AxisGroup(plan.replicate, replicate),
            "pp": AxisGroup(plan.pp, replicate * plan.replicate),
        }

    def seconds(self, transfer: AxisTransfer) -> float:
        """Return the time of a transfer, with all groups of the axis active at once.

        A ring of a group of which g ranks share a host leaves the host through g of its links. An all-reduce
        is a reduce-scatter and an all-gather. `ring`: n − 1 messages of `nbytes` each, one after another.
        """
        group = self.groups[transfer.axis]
        if group.size == 1 or not transfer.nbytes:
            return 0.0
        return self.hardware.efficiency.collective + self._steps(transfer, group)

    def seconds_of_layers(self, transfer: AxisTransfer, layers: int) -> float:
        """Return the time of a transfer in `layers` parts, each with the fixed cost of a collective.

        The steps of a part run while those of the part before do.
        """
        seconds = self.seconds(transfer)
        return seconds + (layers - 1) * self.hardware.efficiency.collective if seconds else 0.0

    def _steps(self, transfer: AxisTransfer, group: AxisGroup) -> float:
        """Return the time of a transfer's steps and bytes."""
        ranks = group.size
        here = group.on_host(self.hardware.devices)
        bandwidth, latency = self._link(here, inside=here == ranks)
        if transfer.collective == "message":
            return latency + transfer.nbytes / self._message_bandwidth(group)
        if transfer.collective == "ring":
            return (ranks - 1) * (latency + transfer.nbytes / self._message_bandwidth(group))
        if transfer.collective == "all-to-all":
            away = (ranks - here) / ranks if here < ranks else (ranks - 1) / ranks
            single = bandwidth / here if here < ranks else bandwidth
            single *= self.hardware.efficiency.all_to_all
            return latency * (ranks - 1) + transfer.nbytes / ranks * away / single
        rounds = 2 if transfer.collective == "all-reduce" else 1
        start = self._start(here, ranks, tree=transfer.collective == "all-reduce")
        return rounds * (start + transfer.nbytes * (ranks - 1) / ranks / bandwidth)

    def _start(self, here: int, ranks: int, *, tree: bool) -> float:
        """Return the latency of a reduce-scatter, a gather, or half an all-reduce; `here`: ranks of a host.

        A ring takes n − 1 steps one after another, one across hosts for each other host, so that its latency
        grows with the ranks. NCCL has trees over the hosts for all-reduces only (Jeaugey 2025,
        arXiv:2506.20252, which is about the ring's latency at scale), and takes what is shorter.
        """
        hosts = -(-ranks // here)
        inside, across = self.hardware.inside.latency, self.hardware.across.latency
        ring = (ranks - hosts) * inside + (hosts - 1) * across
        if not tree or hosts == 1:
            return ring
        return min(ring, (here - 1) * inside + 2 * (hosts - 1).bit_length() * across)

    def share_links(self, first: Axis, second: Axis) -> bool:
        """Return whether two axes use the same links: both those inside hosts, or both those across them."""
        groups = self.groups[first], self.groups[second]
        within = [group.on_host(self.hardware.devices) == group.size for group in groups]
        return min(group.size for group in groups) > 1 and within[0] == within[1]

    def _link(self, here: int, *, inside: bool) -> tuple[float, float]:
        hardware, part = self.hardware, self.hardware.efficiency
        within = hardware.inside.bandwidth * part.inside
        if inside:
            return within, hardware.inside.latency
        beyond = here * hardware.across.bandwidth * part.across / hardware.oversubscription
        return (min(within, beyond) if here > 1 else beyond), hardware.across.latency

    def _message_bandwidth(self, group: AxisGroup) -> float:
        """Return the bandwidth of a message to the next rank of a group: its slowest such link."""
        hardware, part = self.hardware, self.hardware.efficiency
        if group.on_host(hardware.devices) == group.size:
            return hardware.inside.bandwidth * part.inside
        return hardware.across.bandwidth * part.across / hardware.oversubscription
