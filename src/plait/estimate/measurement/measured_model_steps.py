"""Measures steps of small models, and fits CPU figures to them that single operations do not show."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from plait.engine.parallelize import parallelize
from plait.estimate.measurement.timer import Timer
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.hardware import Hardware
from plait.models.gpt2 import gpt2_of
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan
from plait.ranks.collectives import barrier
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy

SMALL = Decoder.of_family("gpt2", layers=8, hidden=32, heads=2, vocab=64, context=16)
"""A model whose step takes hardly more than what plait and torch spend on each operation."""
MIDDLE = Decoder.of_family("gpt2", layers=4, hidden=128, heads=8, vocab=256, context=64)
"""A model of which collectives take about half of the step when it is divided over two ranks."""
LARGE = Decoder.of_family("gpt2", layers=2, hidden=320, heads=8, vocab=1536, context=128)
"""A model whose step is spent on matrix products, and reads memory between them."""
PLAN, _ROWS = Plan(microbatches=4), 8
"""Plan and sequences of a step of a model."""
_RECOMPUTING = replace(PLAN, recompute="full")
_PIPELINED = replace(PLAN, schedule="gpipe")
_HALVINGS = 12
"""Of the range in which a speedup is searched."""
_SMALL_STEPS, _MIDDLE_STEPS, _LARGE_STEPS = 50, 25, 12
_TURNS = 10
"""Repetitions after which the fitted figures no longer change each other."""


@dataclass(frozen=True)
class StepSeconds:
    """Measured seconds of forward and backward of small models, run on all ranks of a host at once."""

    small: float
    middle: float
    large: float
    recomputed: float
    """Of the model of middle size, with recomputation of all layers."""
    divided: float | None
    """Of the same without, its layers divided over the ranks; None for one rank, and where its heads cannot
    be divided."""
    pipelined: float | None
    """Of the large model as a pipeline of all ranks; None where each rank has a core of its own."""


def measure_steps(group: Group, timer: Timer, *, divides: bool) -> StepSeconds:
    """Return the median seconds of training steps of small models, measured by all ranks of `group` together.

    Communication: barriers over `group`, and sums over `tp` where a model is divided.

    `divides`: whether the group has all ranks of the world, over which a model can be divided.
    """
    divided = None
    if divides and group.size > 1 and MIDDLE.undivided_by(group.size) is None:
        plan = replace(PLAN, tp=group.size)
        divided = timer(model_step(MIDDLE, group, plan), times=_MIDDLE_STEPS)
    return StepSeconds(
        timer(model_step(SMALL, group), times=_SMALL_STEPS),
        timer(model_step(MIDDLE, group), times=_MIDDLE_STEPS),
        timer(model_step(LARGE, group), times=_LARGE_STEPS),
        timer(model_step(MIDDLE, group, _RECOMPUTING), times=_MIDDLE_STEPS),
        divided,
        _pipelined(group, timer, divides=divides),
    )


def _pipelined(group: Group, timer: Timer, *, divides: bool) -> float | None:
    shares = group.size > len(os.sched_getaffinity(0))
    if not (divides and shares and group.size <= len(LARGE.kinds)):
        return None
    return timer(model_step(LARGE, group, replace(_PIPELINED, pp=group.size)), times=_LARGE_STEPS)


def model_step(sizes: Decoder, group: Group, plan: Plan = PLAN) -> Callable[[], object]:
    """Return a function that runs forward and backward of a model on the CPU, on each rank or over all.

    It returns when all ranks of the group are done. Communication: that of the plan, and a barrier.
    """
    model = gpt2_of(sizes)
    engine = parallelize(model, plan, Mesh(plan, device="cpu", alone=plan.world == 1), loss=cross_entropy)
    tokens = torch.zeros(_ROWS, sizes.context, dtype=torch.int64)

    def run() -> None:
        engine.forward_backward(tokens, tokens)
        barrier(group, checked=False).wait()

    return run


def predicted_seconds(sizes: Decoder, hardware: Hardware, plan: Plan = PLAN) -> float:
    """Return the seconds predicted for forward and backward of a model, as `model_step` runs them."""
    found = predict(sizes, plan, hardware, rows=_ROWS)
    return found.step_seconds - found.breakdown["optimizer"]


def fitted_to_steps(hardware: Hardware, steps: StepSeconds) -> Hardware:
    """Return `hardware` with fixed costs and rates set so that predictions equal the measured steps.

    From the small model's follows the fixed cost of an operation; from the large one's at which rate products
    read and write, as their operands are not in the caches that the products alone find them in; from the
    recomputed one's the fixed cost of a repeated layer; from the divided one's that of a collective, with the
    time that one rank waits for the slower one; from the pipeline's how much faster ranks that share
    cores are while others wait.
    """
    for _ in range(_TURNS):  # each has a little influence on the other model's step
        hardware = _fitted(hardware, "kernel", steps.small, SMALL, PLAN)
        inverse = _at_which(steps.large, partial(_large, hardware))
        hardware = _with(hardware, operands=1 / max(inverse, 1.0))
    slower = steps.middle / predicted_seconds(MIDDLE, hardware)
    hardware = _fitted(hardware, "repetition", steps.recomputed, MIDDLE, _RECOMPUTING, slower)
    if steps.divided is not None:
        plan = replace(PLAN, tp=hardware.devices)
        hardware = _fitted(hardware, "collective", steps.divided, MIDDLE, plan, slower)
    if steps.pipelined is not None:
        hardware = replace(hardware, waiting_speedup=_speedup(hardware, steps.pipelined))
    return hardware


def _speedup(hardware: Hardware, wanted: float) -> float:
    """Return the `waiting_speedup` at which a pipeline's step takes `wanted` seconds, or the nearest."""
    plan, least, most = replace(_PIPELINED, pp=hardware.devices), 1.0, float(hardware.devices)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        slow = predicted_seconds(LARGE, replace(hardware, waiting_speedup=middle), plan) > wanted
        least, most = (middle, most) if slow else (least, middle)
    return least


def _fitted(
    hardware: Hardware, figure: str, wanted: float, sizes: Decoder, plan: Plan, slower: float = 1.0
) -> Hardware:
    """Return `hardware` with the cost `figure`, 0 or more, at which a step takes `wanted` seconds."""

    def seconds(cost: float) -> float:
        return predicted_seconds(sizes, _with(hardware, **{figure: cost}), plan)

    return _with(hardware, **{figure: max(_at_which(wanted, seconds, slower), 0.0)})


def _large(hardware: Hardware, inverse: float) -> float:
    return predicted_seconds(LARGE, _with(hardware, operands=1 / inverse))


def _at_which(wanted: float, seconds: Callable[[float], float], slower: float = 1.0) -> float:
    """Return the argument at which the linear function `seconds` is `wanted`; at 0 it is `slower`."""
    first, second = seconds(1.0), seconds(2.0)
    slope = second - first
    return (wanted - slower * (first - slope)) / slope


def _with(hardware: Hardware, **figures: float) -> Hardware:
    return replace(hardware, efficiency=replace(hardware.efficiency, **figures))
