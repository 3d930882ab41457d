"""The learning rate: up in a straight line, then down along half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, floor: float, warmup: int) -> float:
    """Give the learning rate of `step`, counted from 0.

    The first `warmup` steps climb to `peak` (the last of them has it); the rest fall along half a cosine and
    step `steps` − 1 has `floor`. Source: Loshchilov and Hutter, "SGDR", 2017, without restarts.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    fraction = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * fraction))
