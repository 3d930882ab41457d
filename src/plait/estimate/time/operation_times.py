"""Operations of a layer, with their sizes, and the seconds that each takes on a device or over a link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal, TypeAlias

from plait.estimate.time.hardware import Hardware
from plait.plan.plan import Plan

Axis = Literal["tp", "cp", "shard", "replicate", "pp", "edp", "ep_etp", "etp", "stage"]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring", "message"]


@dataclass(frozen=True)
class Product:
    """`batch` matrix products of `[m, k]` and `[k, n]`, in one kernel."""

    m: float
    n: float
    k: float
    batch: float = 1
    result_bytes: float = 2
    """Bytes read and written for an element of the result: more where it is added to a gradient."""
    grouped: bool = False
    """Whether each is with another expert's weight, or its gradient."""
    in_float8: bool = False
    """Whether its operands are in float8; else they have the dtype of activations."""

    @property
    def is_linear(self) -> bool:
        """Whether one factor is a weight; other batches of products are parts of attention."""
        return self.batch == 1 or self.grouped


@dataclass(frozen=True)
class FusedAttention:
    """Softmax attention in one kernel: `rows` sequences, `heads` query heads on this rank."""

    rows: float
    heads: float
    key_heads: float
    width: int
    queries: float
    keys: float
    seen: float
    """Fraction of the pairs of query and key that are computed."""
    backward: bool = False


@dataclass(frozen=True)
class Elementwise:
    """Element-wise work, whose time is that of reading and writing `nbytes` of memory."""

    nbytes: float
    kernels: float = 1
    activation: bool = False
    """Whether it is the activation inside an MLP, which computes more for each byte."""


@dataclass(frozen=True)
class AxisTransfer:
    """A collective over an axis, and its size.

    `nbytes`: of an all-gather its result, of an all-to-all the inputs of all ranks, else a rank's input.
    """

    collective: Collective
    axis: Axis
    nbytes: float


DeviceOperation: TypeAlias = Product | FusedAttention | Elementwise


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.6))
"""Tiles of a result that a multiprocessor computes at a time, and the rate beside that of the largest."""


def operation_seconds(operation: DeviceOperation, hardware: Hardware, precision: str, item: int) -> float:
    """Return the device time of `operation`; `item`: bytes of an element of the operands in memory."""
    part, fixed = hardware.efficiency, hardware.efficiency.kernel
    memory = hardware.memory_bandwidth * part.memory
    if isinstance(operation, Elementwise):
        reached = part.activation if operation.activation else part.elementwise
        return operation.nbytes / (memory * reached) + fixed * operation.kernels
    if isinstance(operation, FusedAttention):
        return attention_flops(operation) / (
            hardware.peak_of(attention_precision(precision))
            * (part.attention_backward if operation.backward else part.attention)
        ) + fixed * (3 if operation.backward else 1)
    peak = hardware.peak_of("fp8" if operation.in_float8 else precision)
    rate = peak * part.product * product_efficiency(operation, hardware)
    operands = (operation.m + operation.n) * operation.k * (1 if operation.in_float8 else item)
    nbytes = operation.batch * (operands + operation.m * operation.n * operation.result_bytes)
    computing, moving = product_flops(operation) / rate, nbytes / (memory * part.operands)
    return (max(computing, moving) if hardware.overlaps else computing + moving) + fixed


def product_flops(product: Product) -> float:
    """Return the floating-point operations: a multiplication and an addition for each of m · n · k."""
    return 2 * product.batch * product.m * product.n * product.k


def attention_flops(attention: FusedAttention) -> float:
    """Return the floating-point operations of attention: two products forward, five backward."""
    pairs = attention.rows * attention.heads * attention.queries * attention.keys * attention.seen
    return 2 * pairs * attention.width * (5 if attention.backward else 2)


def attention_precision(precision: str) -> str:
    """Return the precision in which attention computes: the linears', but bf16 instead of fp8."""
    return "bf16" if precision == "fp8" else precision


def product_efficiency(product: Product, hardware: Hardware) -> float:
    """Return which part of the peak rate a product of this shape can reach, at most 1.

    Results are computed in tiles, a wave of them at a time, one on each multiprocessor: tiles at the edge and
    the last wave are not full. Products with a short sum spend their time on loading and storing tiles.
    """
    depth = product.k / (product.k + hardware.efficiency.half_depth)
    return depth * _tiles_used(product, hardware.multiprocessors)


def _tiles_used(product: Product, units: int) -> float:
    """Return the part of the product rate that is left by tiles that are not full; 1 on a CPU (`units` 0)."""
    if units == 0:
        return 1.0
    best = 0.0
    for height, width, rate in TILES:
        tiles = ceil(product.m / height) * ceil(product.n / width) * product.batch
        used = product.m * product.n * product.batch / (tiles * height * width)
        waves = ceil(tiles / units)
        best = max(best, rate * used * tiles / (waves * units))
    return best


@dataclass(frozen=True)
class AxisGroup:
    """Where the ranks of a group are: `size` ranks, each `stride` ranks after the one before."""

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
        """The group of each axis; ranks are numbered with `tp` innermost, then cp, shard, replicate, pp.

        Of experts `etp` is innermost, then ep, edp, replicate, pp.
        """
        plan = self.plan
        replicate = plan.tp * plan.cp * plan.shard
        return {
            "tp": AxisGroup(plan.tp, 1),
            "cp": AxisGroup(plan.cp, plan.tp),
            "shard": AxisGroup(plan.state_ranks, plan.tp),
            "replicate": AxisGroup(plan.replicate, replicate),
            "pp": AxisGroup(plan.pp, replicate * plan.replicate),
            "edp": AxisGroup(plan.edp, plan.ep * plan.etp),
            "ep_etp": AxisGroup(plan.ep * plan.etp, 1),
            "etp": AxisGroup(plan.etp, 1),
            "stage": AxisGroup(plan.world // plan.pp, 1),
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
        """Return the seconds of a transfer made in `layers` parts, each with a collective's latency.

        The steps of a part run while those of the part before do.
        """
        seconds = self.seconds(transfer)
        return seconds + (layers - 1) * self.hardware.efficiency.collective if seconds else 0.0

    def _steps(self, transfer: AxisTransfer, group: AxisGroup) -> float:
        """Return the time of a transfer's steps and bytes."""
        ranks = group.size
        here = group.on_host(self.hardware.devices)
        bandwidth, latency = self._link(here, inside=here == ranks)
        if transfer.collective in ("message", "ring"):  # to the next rank, by its slowest such link
            single, _ = self._link(1, inside=here == ranks)
            messages = 1 if transfer.collective == "message" else ranks - 1
            return messages * (latency + transfer.nbytes / single)
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
        """Return whether two axes use the same links: both inside hosts, or both between hosts."""
        groups = self.groups[first], self.groups[second]
        within = [group.on_host(self.hardware.devices) == group.size for group in groups]
        return min(group.size for group in groups) > 1 and within[0] == within[1]

    def _link(self, here: int, *, inside: bool) -> tuple[float, float]:
        """Return bandwidth and latency inside a host, or of `here` ranks of a host to others."""
        hardware, part = self.hardware, self.hardware.efficiency
        within = hardware.inside.bandwidth * part.inside
        if inside:
            return within, hardware.inside.latency
        beyond = here * hardware.across.bandwidth * part.across / hardware.oversubscription
        return (min(within, beyond) if here > 1 else beyond), hardware.across.latency
