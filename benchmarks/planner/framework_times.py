"""The time of a published run's step: that of plait, with what its framework does otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from frameworks import Framework

from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import Hardware
from plait.estimate.time.layer_times import LayerTimer, ShardedPart
from plait.estimate.time.layer_work import LayerWork, Recomputation
from plait.estimate.time.operation_times import (
    AxisTransfer,
    DeviceOperation,
    Elementwise,
    FusedAttention,
    Product,
)
from plait.estimate.time.step_times import NANOSECOND, StepTimes, stage_kinds, stage_modes
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.plan.plan import Plan
from plait.schedules.action import Kind
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import schedule

OVERLAP_SHARE = 0.7
"""The part of a transfer in shards that products hide, see `Framework.overlaps_tensor_products`."""
REPEATS = 6
"""Groups of micro-batches, as many as ranks each, that are simulated; later ones repeat the last."""


@dataclass(frozen=True)
class FrameworkTimer(LayerTimer):
    """Times layers as a framework runs them."""

    framework: Framework = field(kw_only=True)

    @property
    def message_seconds(self) -> float:
        """The seconds of a message between neighbouring stages."""
        shape, plan = self.shape, self.shape.plan
        if not self.framework.messages_divided or plan.cuts_sequence or plan.pp == 1:
            return super().message_seconds
        return self.network.seconds(AxisTransfer("message", "pp", shape.outside / plan.tp))

    @property
    def hides_gradient_sums(self) -> bool:
        """Whether gradients are summed over data-parallel ranks during the last backward."""
        return self.framework.overlaps_data_sums

    def work(self, kind: LayerKind) -> LayerWork:
        """Return the operations and collectives of a layer of `kind`."""
        found, framework = super().work(kind), self.framework
        if kind == "head":
            parts = 2 if framework.fused_loss else 1
            (*before, loss), (loss_backward, *after) = found.forward, found.backward
            forward, backward = (*before, _divided(loss, parts)), (_divided(loss_backward, parts), *after)
            backward += (loss,) * framework.loss_metrics
            # It is no block.
            nothing = Recomputation()
            found = replace(found, forward=forward, backward=backward, selective=nothing, full=nothing)
        elif kind != "embedding":
            core = tuple(one for one in found.forward if isinstance(one, FusedAttention))
            full = Recomputation(found.forward, found.forward_transfers, found.forward_exchanges)
            selective = Recomputation(core) if framework.recomputes_attention_only else found.selective
            found = replace(found, selective=selective, full=full)
        return replace(
            found,
            forward=self._operations(found.forward),
            backward=self._operations(found.backward),
            selective=replace(found.selective, operations=self._operations(found.selective.operations)),
            full=replace(found.full, operations=self._operations(found.full.operations)),
        )

    def _operations(self, operations: Iterable[DeviceOperation]) -> tuple[DeviceOperation, ...]:
        """Return operations as the framework runs them."""
        found: list[DeviceOperation] = []
        for one in operations:
            if isinstance(one, FusedAttention) and not self.framework.fused_attention:
                found += _unfused(one, self.shape.item)
            else:
                found.append(one)
        passes = self.framework.elementwise_passes
        return tuple(
            replace(one, nbytes=one.nbytes * passes) if isinstance(one, Elementwise) else one for one in found
        )

    def exposed_forward(self, transfers: Iterable[AxisTransfer]) -> float:
        """Return the seconds of a forward's `tp` communication that no computation hides."""
        share = OVERLAP_SHARE if self.framework.overlaps_tensor_products else 0.0
        return super().exposed_forward(transfers) * (1 - share)

    def exposed_backward(self, work: LayerWork, meanwhile: float) -> float:
        """Return the seconds of a backward's `tp` communication that no computation hides."""
        if self.framework.overlaps_tensor_products:
            return self.exposed_forward(work.backward_gathers + work.backward_transfers)
        return super().exposed_backward(work, meanwhile if self.framework.overlaps_tensor_sums else 0.0)

    def gather_seconds(self, part: ShardedPart, *, backward: bool) -> float:
        """Return the seconds of gathers; those of once a step are spread evenly over the forwards."""
        once = 0.0 if backward else 1 / self.shape.plan.microbatches
        return super().gather_seconds(part, backward=backward) * (
            1.0 if self.framework.frees_gathered else once
        )


def _divided(operation: DeviceOperation, parts: int) -> DeviceOperation:
    assert isinstance(operation, Elementwise)
    return replace(operation, nbytes=operation.nbytes / parts, kernels=operation.kernels / parts)


def _unfused(fused: FusedAttention, item: int) -> tuple[DeviceOperation, ...]:
    """Return attention as products, softmax and a dropout of its weights, which leave out nothing masked."""
    queries, keys, width = fused.queries, fused.keys, fused.width
    batch = fused.rows * fused.heads
    scores = Product(queries, keys, width, batch)
    values = Product(queries, width, keys, batch)
    matrix = batch * queries * keys * item
    if not fused.backward:
        return scores, Elementwise(4.5 * matrix, 2), values
    # Four products: of the weights, the values, the queries and the keys.
    return scores, Product(keys, width, queries, batch), Elementwise(5.5 * matrix, 2), values, values


@dataclass(frozen=True)
class FrameworkTimes(StepTimes):
    """The times of a step as a framework runs it, those of many micro-batches extrapolated."""

    timer: FrameworkTimer
    shorter: Schedule | None = None
    """The same schedule with fewer micro-batches; then `schedule` too has fewer than the plan, and the times
    of the others are extrapolated: the order of actions repeats itself."""

    def timing(self, hop: float) -> Timing:
        """Return the durations of actions and messages in nanoseconds; a message takes `hop` seconds."""
        if not self.timer.framework.blocking_messages:
            return super().timing(hop)
        forward = [round((one.forward.total + hop) / NANOSECOND) for one in self.passes]
        inputs = [round((one.inputs.total + hop) / NANOSECOND) for one in self.passes]
        weights = [round(one.weights.total / NANOSECOND) for one in self.passes]
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        none = [0] * self.schedule.stages
        return Timing({Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}, none, none)

    def ends_with(self, hop: float) -> tuple[float, ...]:
        """Return the seconds to each rank's last action where a message takes `hop` seconds."""
        if self.shorter is None:
            return super().ends_with(hop)
        timing = self.timing(hop)
        ends, before = self.last_ends(self.schedule, timing), self.last_ends(self.shorter, timing)
        left = self.timer.shape.plan.microbatches - self.schedule.microbatches
        repeats = left / (self.schedule.microbatches - self.shorter.microbatches)
        return tuple(
            (end + repeats * (end - earlier)) * NANOSECOND for end, earlier in zip(ends, before, strict=True)
        )


def quick_step(
    model: Decoder, plan: Plan, cut: Sequence[int], rows: int, framework: Framework, hardware: Hardware
) -> FrameworkTimes:
    """Return the times of a step; where it has many micro-batches, those of two shorter ones extrapolated."""
    precision = framework.product_precision or plan.precision or "fp32"
    shape = MicrobatchShape(model, plan, rows / plan.microbatches)
    timer = FrameworkTimer(shape, hardware, precision, framework=framework)
    count, pp = plan.microbatches, plan.pp
    shorter = None
    # Interleaved orders of a number that the ranks do not divide have groups of unequal sizes.
    repeats = plan.schedule != "interleaved" or count % pp == 0
    if repeats and count > (REPEATS + 1) * pp:
        count = count % pp + REPEATS * pp
        shorter = _schedule(plan.schedule, pp, count - pp, plan.chunks)
    made = _schedule(plan.schedule, pp, count, plan.chunks)
    return FrameworkTimes(timer, made, stage_kinds(model.kinds, cut), stage_modes(plan, cut), shorter=shorter)


@lru_cache(maxsize=256)  # many runs have the same schedule
def _schedule(policy: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks)
