"""Seconds of each kind of layer on one rank for one micro-batch: forward, input and weight gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import Literal, NamedTuple

from plait.estimate.time.hardware import Hardware
from plait.estimate.time.layer_work import LayerWork, MicrobatchSizes, Recomputation
from plait.estimate.time.operation_times import (
    AxisTransfer,
    DeviceOperation,
    Elementwise,
    Network,
    Product,
    operation_seconds,
)
from plait.plan.decoder_sizes import LayerKind
from plait.plan.plan import Recompute


@dataclass(frozen=True)
class Parts:
    """Seconds of a pass of a layer (forward, …) by use: matrix products, attention, communication, …."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recomputation: float = 0.0
    tp: float = 0.0
    """Communication over `tp` that no computation overlaps; `cp`, `ep` and `dp`: over those axes."""
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    host: float = 0.0
    """Time in which the device waits for the host to start operations."""

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each use, in the order of the fields."""
        return (
            self.products,
            self.attention,
            self.elementwise,
            self.recomputation,
            self.tp,
            self.cp,
            self.ep,
            self.dp,
            self.host,
        )

    @cached_property
    def total(self) -> float:
        """The seconds of all uses together."""
        return math.fsum(self.seconds)

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(add, self.seconds, other.seconds))

    def times(self, count: float) -> Parts:
        """Return the parts multiplied by `count`."""
        return Parts(*[part * count for part in self.seconds])


@dataclass(frozen=True)
class PassTimes:
    """Times of a layer's or a stage's forward, input gradient and weight gradient for one micro-batch."""

    forward: Parts
    inputs: Parts
    weights: Parts

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(
            self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights
        )

    def times(self, count: float) -> PassTimes:
        """Return the times of `count` equal layers."""
        return PassTimes(self.forward.times(count), self.inputs.times(count), self.weights.times(count))

    @cached_property
    def backward(self) -> float:
        """Seconds of input and weight gradient."""
        return self.inputs.total + self.weights.total

    @cached_property
    def total(self) -> Parts:
        """The seconds of forward, input gradient and weight gradient together, by use."""
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class WholeLayerTimes:
    """Times of a layer without the gathers and gradient sums of sharded parameters."""

    forward: Parts
    inputs: Parts
    weights: Parts
    hiding_forward: float
    """Seconds of the forward in which parameters of the next layer can be gathered; `hiding_backward` too."""
    hiding_backward: float
    sums_forward: float
    """Seconds of transfers over `tp` in it, which may use the same links."""
    sums_backward: float
    started_forward: float
    """Operations that the host starts."""
    started_backward: float


class ShardedPart(NamedTuple):
    """Some parameters of a rank, before sharding, whose state is sharded over the same axis."""

    axis: Literal["shard", "edp"]
    ranks: int
    """Between which their state is sharded; 1: it is not."""
    elements: float
    item: float
    """The mean bytes of one as layers have it."""


HOST_LINK = 25e9
"""Bytes a second between a device and its host, of PCIe 4.0; assumed: no hardware file has it."""

LayerVariant = tuple[LayerKind, Recompute, bool]
"""A kind of layer, its recomputation, and whether its weight gradients run during the sums over `tp`."""


@dataclass(frozen=True)
class LayerTimer:
    """Predicts the seconds of a plan's layers on given hardware; equal layers are computed once."""

    shape: MicrobatchSizes
    hardware: Hardware
    precision: str
    """Precision of the products."""
    known: dict[LayerVariant, PassTimes] = field(default_factory=dict, compare=False)
    """Times computed before; timers of plans that differ in nothing that a layer depends on may share it."""
    whole: dict[LayerVariant, WholeLayerTimes] = field(default_factory=dict, compare=False)
    """Likewise without what depends on the sharding of parameters."""

    @cached_property
    def network(self) -> Network:
        """The network of the plan's axes, which times transfers."""
        return Network(self.shape.plan, self.hardware)

    @property
    def speedup(self) -> float:
        """The factor by which a rank's CPU computes faster while other ranks of its pipeline wait."""
        return self.hardware.waiting_speedup if self.shape.plan.pp > 1 else 1.0

    @property
    def message_seconds(self) -> float:
        """The seconds of a message between neighbouring stages."""
        if self.shape.plan.pp == 1:
            return 0.0
        return self.network.seconds(AxisTransfer("message", "pp", self.shape.message_bytes))

    @property
    def hides_gradient_sums(self) -> bool:
        """Whether gradients are summed over data-parallel ranks during the last backward."""
        return self.hardware.overlaps

    def work(self, kind: LayerKind) -> LayerWork:
        """Return the operations and collectives of a layer of `kind`."""
        return self.shape.work(kind)

    def times(self, kind: LayerKind, recompute: Recompute, *, at_once: bool = True) -> PassTimes:
        """Return the seconds of a layer of `kind` for one micro-batch: forward, input and weight gradient.

        `at_once`: its weight gradients follow its input gradient, so that they run during sums over `tp`.
        """
        variant = kind, recompute, at_once
        if variant not in self.known:
            self.known[variant] = self._times(variant)
        return self.known[variant]

    def _times(self, variant: LayerVariant) -> PassTimes:
        if variant not in self.whole:
            self.whole[variant] = self._whole_times(*variant)
        one, kind = self.whole[variant], variant[0]
        share = self.network.share_links("tp", "shard")
        free, free_backward = (
            max(seconds - sums, 0.0) if share else seconds
            for seconds, sums in (
                (one.hiding_forward, one.sums_forward),
                (one.hiding_backward, one.sums_backward),
            )
        )
        forward = one.forward + Parts(dp=self._exposed_gather(kind, free, backward=False))
        inputs = one.inputs + Parts(dp=self._exposed_gather(kind, free_backward, backward=True))
        return PassTimes(
            self._with_host(forward, one.started_forward),
            self._with_host(inputs, one.started_backward),
            one.weights,
        )

    def _whole_times(self, kind: LayerKind, recompute: Recompute, at_once: bool) -> WholeLayerTimes:
        work = self.work(kind)
        forward = self._parts(work.forward)
        backward, weights = self._parts(work.backward), self._parts(work.weights)
        again = {"none": Recomputation(), "selective": work.selective, "full": work.full}[recompute]
        tp_forward = self.exposed_forward(work.forward_transfers)
        recomputed = self._parts(again.operations).total + self.exposed_forward(again.transfers)
        recomputed += self._transfers(again.dispatches)
        recomputed += self.hardware.efficiency.repetition if again.operations else 0.0
        meanwhile = weights.total if at_once else 0.0
        tp_backward = self.exposed_backward(work, meanwhile)
        exchanges = self._exposed_exchanges(work.forward_exchanges, forward)
        exchanges_backward = self._exposed_exchanges(work.backward_exchanges, backward)
        exchanges_backward += self._exposed_exchanges(again.exchanges, forward)
        transfers = work.backward_gathers + work.backward_transfers + again.transfers
        return WholeLayerTimes(
            forward + Parts(tp=tp_forward, cp=exchanges, ep=self._transfers(work.forward_dispatches)),
            backward
            + Parts(
                recomputation=recomputed,
                tp=tp_backward,
                cp=exchanges_backward,
                ep=self._exposed_dispatches(work, meanwhile),
            ),
            weights,
            forward.total + tp_forward,
            backward.total + weights.total + recomputed + tp_backward,
            self._transfers(work.forward_transfers),
            self._transfers(transfers),
            _started(work.forward),
            # All of the forward and of every layer, as when the constants of the hardware files were fitted.
            _started(work.backward + (work.forward if recompute == "full" else ())),
        )

    def _parts(self, operations: Iterable[DeviceOperation]) -> Parts:
        products = attention = elementwise = 0.0
        for operation in operations:
            seconds = operation_seconds(operation, self.hardware, self.precision, self.shape.item)
            if isinstance(operation, Product) and operation.is_linear:
                products += seconds
            elif isinstance(operation, Elementwise):
                elementwise += seconds
            else:
                attention += seconds
        return Parts(products, attention, elementwise)

    def _transfers(self, transfers: Iterable[AxisTransfer]) -> float:
        return sum(map(self.network.seconds, transfers))

    def exposed_forward(self, transfers: Iterable[AxisTransfer]) -> float:
        """Return the seconds of `tp` communication that the forward waits for: all of it."""
        return self._transfers(transfers)

    def exposed_backward(self, work: LayerWork, meanwhile: float) -> float:
        """Return the seconds of `tp` communication in a backward that no computation overlaps.

        `meanwhile`: seconds of weight gradients that run during its sums.
        """
        gathers, others = self._transfers(work.backward_gathers), self._transfers(work.backward_transfers)
        return gathers + (max(others - meanwhile, 0.0) if self.hardware.overlaps else others)

    def _exposed_dispatches(self, work: LayerWork, meanwhile: float) -> float:
        """Return the seconds of communication over `ep` and `etp` in a backward that nothing overlaps.

        `meanwhile`: seconds of weight gradients, which run during sums over `tp` first, and then while the
        gradients of tokens travel back: half of the bytes.
        """
        seconds = self._transfers(work.backward_dispatches)
        free = max(meanwhile - self._transfers(work.backward_transfers), 0.0)
        return seconds - min(seconds / 2, free) if self.hardware.overlaps else seconds

    def _exposed_exchanges(self, exchanges: tuple[AxisTransfer, ...], computed: Parts) -> float:
        """Return the time of `cp` communication that does not overlap with computing attention."""
        seconds, ranks = self._transfers(exchanges), self.shape.plan.cp
        in_ring = all(one.collective == "ring" for one in exchanges)
        if not in_ring or not self.hardware.overlaps:
            return seconds
        return max(seconds - computed.attention * (ranks - 1) / ranks, 0.0)

    def _exposed_gather(self, kind: LayerKind, computed: float, *, backward: bool) -> float:
        """Return the seconds of parameter gathers and gradient sums that no computation overlaps.

        Sharded parameters of the next layer are gathered while a layer runs; with `reduce` `each` the
        gradients of the one before are summed during a backward.
        """
        timing = self.shape.timing
        shape = self.shape
        if not timing.allocates or shape.state_ranks == shape.expert_state_ranks == 1:
            return 0.0
        experts = shape.expert_parameters((kind,), (True, False))
        parts, seconds = self.parts(shape.parameters(kind), experts, (kind,)), 0.0
        if timing.gathers == "each use":
            seconds += sum(self.gather_seconds(part, backward=backward) for part in parts)
        if backward and timing.scatters == "each":
            item = shape.kind.reduce.itemsize
            sums = (AxisTransfer("reduce-scatter", part.axis, part.elements * item) for part in parts)
            seconds += self._transfers(sums)
        return max(seconds - computed, 0.0) if self.hardware.overlaps else seconds

    def parts(
        self, count: float, experts: float, kinds: Sequence[LayerKind] | None = None
    ) -> tuple[ShardedPart, ShardedPart]:
        """Return `count` parameters in two groups by the axis that shards them: dense ones, and `experts`.

        `experts`: how many of them belong to experts that the plan divides. `kinds`: those of the layers that
        they belong to; None: of all layers.
        """
        shape = self.shape
        return (
            ShardedPart("shard", shape.state_ranks, count - experts, shape.gathered_item(kinds)),
            ShardedPart("edp", shape.expert_state_ranks, experts, shape.item),
        )

    def gather_seconds(self, part: ShardedPart, *, backward: bool) -> float:
        """Return the seconds of gathering sharded parameters for a forward or a backward."""
        nbytes = part.elements * part.item
        away = self.shape.kind.offloads_parameters and self.hardware.overlaps
        copied = nbytes / part.ranks / HOST_LINK if away else 0.0
        return copied + self.network.seconds(AxisTransfer("all-gather", part.axis, nbytes))

    def _with_host(self, parts: Parts, started: float) -> Parts:
        """Return `parts` with the time that the device waits for the host to start the operations.

        None where CUDA graphs are replayed: the host starts them by one call.
        """
        plan = self.shape.plan
        if plan.cuda_graphs and plan.tp == plan.cp == 1:
            return parts
        needed = started * self.hardware.efficiency.host
        return parts + Parts(host=max(needed - parts.total, 0.0))


def _started(operations: Iterable[DeviceOperation]) -> float:
    return sum(operation.kernels if isinstance(operation, Elementwise) else 1 for operation in operations)
