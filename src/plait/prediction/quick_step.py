"""The times of a step from a part of its micro-batches, for searches over many plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from plait.plan import Plan
from plait.prediction.decoder import Decoder, stage_kinds
from plait.prediction.framework import Framework
from plait.prediction.hardware import Hardware
from plait.prediction.layer_operations import StepShape
from plait.prediction.layer_times import LayerTimer
from plait.prediction.step_times import StepTimes, stage_modes
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import schedule

REPEATS = 6
"""Groups of micro-batches, as many as ranks each, that are simulated; later ones repeat the last."""


def quick_step(
    model: Decoder, plan: Plan, cut: Sequence[int], rows: int, framework: Framework, hardware: Hardware
) -> StepTimes:
    """Return the times of a step; where it has many micro-batches, those of two shorter ones extrapolated."""
    shape = StepShape(model, plan, framework, rows / plan.microbatches)
    timer = LayerTimer(shape, hardware, framework.product_precision or plan.precision or "fp32")
    count, pp = plan.microbatches, plan.pp
    shorter = None
    # Interleaved orders of a number that the ranks do not divide have groups of unequal sizes.
    repeats = plan.schedule != "interleaved" or count % pp == 0
    if repeats and count > (REPEATS + 1) * pp:
        count = count % pp + REPEATS * pp
        shorter = _schedule(plan.schedule, pp, count - pp, plan.chunks)
    made = _schedule(plan.schedule, pp, count, plan.chunks)
    return StepTimes(timer, made, stage_kinds(model.kinds, cut), stage_modes(plan, cut), shorter)


@lru_cache(maxsize=256)  # many plans of a search have the same schedule
def _schedule(policy: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks)
