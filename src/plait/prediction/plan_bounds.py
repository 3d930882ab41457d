"""Lower bounds of the step time and the memory of a plan, for every cut of the model into stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.framework import Framework
from plait.prediction.hardware import Hardware
from plait.prediction.layer_operations import StepShape
from plait.prediction.layer_times import LayerTimer
from plait.prediction.memory_by_size import layer_memory, state_bytes
from plait.prediction.step_times import NANOSECOND, optimizer_seconds

_ATOMIC = ("1f1b", "gpipe")
"""Policies of one stage a rank whose backwards are whole: the stage before waits for weight gradients too."""
_SPLIT = ("zb-h1", "zb-h2")
"""Policies of one stage a rank whose weight gradients are actions of their own."""
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class ModelTime:
    """Seconds of a micro-batch over all layers, and the least part of a layer's that is its forward."""

    seconds: float
    forward: float


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for plans of one model and batch on given hardware."""

    model: Decoder
    hardware: Hardware
    batch: int
    framework: Framework
    _times: dict[tuple[object, ...], ModelTime] = field(default_factory=dict)

    def timer(self, plan: Plan) -> LayerTimer:
        """Return what times the layers of a plan."""
        shape = StepShape(self.model, plan, self.framework, self.batch / plan.dp / plan.microbatches)
        return LayerTimer(shape, self.hardware, self.framework.product_precision or plan.precision or "fp32")

    def model_time(self, plan: Plan) -> ModelTime:
        """Return the time of all layers; plans that differ only in what no layer depends on share it."""
        sharded = plan.strategy in ("gradients", "full")
        state = (plan.strategy, plan.reduce, plan.state_ranks) if sharded else ()
        rows = self.batch / plan.dp / plan.microbatches
        key: tuple[object, ...] = (plan.tp, plan.cp, rows, plan.recompute, plan.sequence_parallel, state)
        key += () if self.framework.frees_gathered else (plan.microbatches,)
        if key not in self._times:
            self._times[key] = self._measured(plan)
        return self._times[key]

    def _measured(self, plan: Plan) -> ModelTime:
        timer, seconds, part = self.timer(plan), 0.0, 1.0
        assert not isinstance(plan.recompute, tuple)
        for kind in ("embedding", "attention", "mlp", "head"):
            passes = timer.times(kind, plan.recompute)
            whole = passes.total.total
            seconds += whole * (self.model.layers if kind in ("attention", "mlp") else 1)
            part = min(part, passes.forward.total / whole) if whole else 0.0
        return ModelTime(seconds, part)

    def pipeline_seconds(self, plan: Plan, time: ModelTime, policy: str | None, chunks: int) -> float:
        """Return a time in which no cut of the model finishes the micro-batches under a policy (None: any).

        Let stage r take x_r for a micro-batch, of which the fraction φ at least passes on every stage before
        the rank of stage r can start, or can be done after it ends. Then a step takes
        T ≥ φ · (x_0 + … + x_{r−1}) + m · x_r for every r. The least T for which the x_r can sum to X is
        φ · X / (1 − (1 − φ / m)^p), reached where all p inequalities are equations; for φ → 0, m · X / p.
        """
        total = time.seconds - 1.5 * NANOSECOND * plan.pp * chunks
        count, ranks = plan.microbatches, plan.pp
        part = 1.0 if policy in _ATOMIC else time.forward if policy in _SPLIT else 0.0
        busy = count * total / ranks
        if part * ranks < 1e-6 or ranks == 1 or chunks > 1:
            return busy * _ROUNDING
        return max(busy, part * total / (1 - (1 - part / count) ** ranks)) * _ROUNDING

    def optimizer_seconds(self, plan: Plan) -> float:
        """Return the seconds after the last gradient of a rank with the mean number of parameters."""
        return sum(optimizer_seconds(self.timer(plan), self._mean(plan))) * _ROUNDING

    def memory(self, plan: Plan, policy: str | None = None) -> float:
        """Return bytes that some rank allocates or reserves at least under a policy (None: any), for any cut.

        Let rank r hold state c_r, and k_r micro-batches of a_r each at once. Then the largest memory is
        M ≥ c_r + k_r · a_r for every r, and the (M − c_r) / k_r add up to the sum of the a_r at least. With
        k_r = 1 that is the mean: when the last stage has run a forward, all keep a micro-batch.
        """
        shape = self.timer(plan).shape
        parameters, gradients, optimizer, _ = state_bytes(shape, self._mean(plan), 0.0)
        assert not isinstance(plan.recompute, tuple)
        kept = 0.0
        for kind in ("embedding", "attention", "mlp", "head"):
            times = self.model.layers if kind in ("attention", "mlp") else 1
            kept += times * layer_memory(kind, plan.recompute, shape).until_inputs
        kept = max(kept - plan.pp, 0.0)  # a stage's activations are rounded to whole bytes
        state = (parameters + gradients + optimizer) * plan.pp
        least = (state + kept) / plan.pp
        if policy in ("1f1b", *_SPLIT):
            at_once = [min(plan.microbatches, plan.pp - rank) for rank in range(plan.pp)]
            least = max(least, (kept + state / at_once[0]) / sum(1 / count for count in at_once))
        return (least + self.hardware.reserved) * _ROUNDING

    def _mean(self, plan: Plan) -> float:
        return self.model.parameters_of(self.model.kinds, plan.tp) / plan.pp
