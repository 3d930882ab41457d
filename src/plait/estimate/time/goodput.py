"""`best_interval`: the best interval of checkpoints, and the fraction of time that is useful training.

Failures of a device are independent and exponentially distributed, those of a run too; a failure during a
restart begins it anew (Daly 2006, "A higher order estimate of the optimum checkpoint interval").
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, log, sqrt
from random import Random

from plait.errors import PlanError

_MOST_EXPONENT = 700.0
PERIODS = 2000
"""Intervals with their saves that a simulation runs through."""


@dataclass(frozen=True)
class Failures:
    """Mean time between a run's failures, and the durations of saving and restarting, in seconds."""

    mean_time: float
    """Between failures of the run: that of a device over the number of devices."""
    checkpoint: float
    """For which training stops to save: what is written in the background is not part of it."""
    restart: float
    """From a failure to the first step after it, with start, compilation and loading."""

    def __post_init__(self) -> None:
        for name in ("mean_time", "checkpoint", "restart"):
            value = getattr(self, name)
            if not (0 <= value < inf) or (name == "mean_time" and value == 0):
                raise PlanError(f"{name} is {value!r} seconds: give at least 0, and mean_time above 0.")


@dataclass(frozen=True)
class Goodput:
    """The fraction of time that is useful training, for a given interval between two saves."""

    interval: float
    """Seconds of training between two saves."""
    expected: float
    """By formula."""
    simulated: float
    """By Monte Carlo simulation; `deviation`: the standard error of it, `seed`: of its random numbers."""
    deviation: float
    seed: int


def best_interval(failures: Failures, seed: int = 0) -> Goodput:
    """Return the interval between two saves with the highest expected goodput, with that goodput.

    The goodput is computed by formula and by simulation.
    """
    low, high = log(1e-3), log(100 * failures.mean_time + 1)
    for _ in range(200):  # the goodput has one maximum
        third = (high - low) / 3
        if expected_goodput(failures, exp(low + third)) < expected_goodput(failures, exp(high - third)):
            low += third
        else:
            high -= third
    interval = exp((low + high) / 2)
    simulated, deviation = simulated_goodput(failures, interval, seed)
    return Goodput(interval, expected_goodput(failures, interval), simulated, deviation, seed)


def young_interval(failures: Failures) -> float:
    """Return the first-order estimate √(2 · checkpoint · mean time) of the best interval (Young 1974)."""
    return sqrt(2 * failures.checkpoint * failures.mean_time)


def expected_goodput(failures: Failures, interval: float) -> float:
    """Return the expected fraction of useful time with a save after every `interval` seconds.

    The expected time until the interval and its save are done is M · e^(R/M) · (e^((τ + δ)/M) − 1).
    """
    mean, exponent = failures.mean_time, (interval + failures.checkpoint) / failures.mean_time
    if exponent + failures.restart / mean > _MOST_EXPONENT:
        return 0.0
    return interval / (mean * exp(failures.restart / mean) * expm1(exponent))


def simulated_goodput(failures: Failures, interval: float, seed: int) -> tuple[float, float]:
    """Return the simulated fraction of useful time, and its standard error."""
    draw, samples = Random(seed), []
    for _ in range(PERIODS):
        spent, left = 0.0, draw.expovariate(1 / failures.mean_time)
        needed = interval + failures.checkpoint
        while left < needed:  # a failure: what was done since the last save is lost
            spent += left
            left = draw.expovariate(1 / failures.mean_time)
            needed = failures.restart + interval + failures.checkpoint
            if spent > PERIODS * (needed + failures.mean_time):
                return 0.0, 0.0
        samples.append(spent + needed)
    mean = sum(samples) / len(samples)
    variance = sum((one - mean) ** 2 for one in samples) / (len(samples) - 1)
    return interval / mean, interval / mean**2 * sqrt(variance / len(samples))
