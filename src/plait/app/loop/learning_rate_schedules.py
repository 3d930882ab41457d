"""Learning rates as functions of the step: a linear warm-up, then constant or one of several decays."""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.errors import ConfigError
from plait.plan.argument_checks import require_number, require_whole

LearningRate = Callable[[int], float]
"""Returns the learning rate of a step, counted from 0."""


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LearningRate:
    """Return a learning rate schedule with a linear warm-up to `peak`, then a cosine decay to `floor`.

    The first `warmup` steps climb to `peak` (the last of them has it); the rest fall along half a cosine, and
    step `steps` − 1 has `floor`. Source: Loshchilov and Hutter, "SGDR", 2017, without restarts.
    """
    return _warmup(peak, steps, warmup, floor, lambda fraction: 0.5 * (1 + math.cos(math.pi * fraction)))


def warmup_linear(peak: float, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LearningRate:
    """Return a schedule with a linear warm-up to `peak`, then a linear decay to `floor`."""
    return _warmup(peak, steps, warmup, floor, lambda fraction: 1 - fraction)


def warmup_constant(peak: float, *, warmup: int = 0) -> LearningRate:
    """Return a schedule with a linear warm-up of `warmup` steps, then `peak`."""
    return _warmup(peak, 1, warmup, peak, lambda fraction: 1.0)


def warmup_stable_decay(
    peak: float, *, steps: int, warmup: int = 0, decay: int | None = None, floor: float = 0.0
) -> LearningRate:
    """Return a schedule: linear warm-up, then `peak`, in the last `decay` steps linear decay to `floor`.

    `decay`: None: a tenth of `steps`, at least one; step `steps` − 1 has `floor`. Source: Hu et al.,
    "MiniCPM", 2024, with a linear decay as in Hägele et al., "Scaling laws and compute-optimal training
    beyond fixed training durations", 2024.
    """
    require_whole("steps", steps)
    require_whole("warmup", warmup, least=0)
    if decay is not None:
        require_whole("decay", decay)
    if decay is not None and warmup + decay > steps:
        raise ConfigError(
            f"warmup = {warmup} and decay = {decay} are more than steps = {steps} together: lower one of "
            "them."
        )
    falling = max(1, steps // 10) if decay is None else decay
    stable = max(0, steps - warmup - falling) / max(1, steps - warmup)
    return _warmup(peak, steps, warmup, floor, lambda fraction: min(1.0, (1 - fraction) / (1 - stable)))


def _warmup(
    peak: float, steps: int, warmup: int, floor: float, decay: Callable[[float], float]
) -> LearningRate:
    require_number("peak", peak)
    require_whole("steps", steps)
    require_whole("warmup", warmup, least=0)
    require_number("floor", floor)
    if floor > peak:
        raise ConfigError(
            f"the learning rate falls to floor = {floor:g} from peak = {peak:g}: give a lower floor."
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        fraction = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
        return floor + (peak - floor) * decay(fraction)

    return rate
