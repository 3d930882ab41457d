"""Steps of small models: their times give the figures of a CPU that single operations do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from plait.calibration.timer import Timer
from plait.comm.collectives import barrier
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.composer import parallelize
from plait.models import gpt2
from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.hardware import Hardware
from plait.prediction.step_prediction import predict
from plait.tensor.losses import cross_entropy

SMALL = Decoder(layers=8, hidden=32, heads=2, vocab=64, context=16, biases=True, positions=True)
"""A model whose step takes hardly more than what plait and torch spend on each operation."""
MIDDLE = Decoder(layers=4, hidden=128, heads=8, vocab=256, context=64, biases=True, positions=True)
"""A model of which collectives take about half of the step when it is divided over two ranks."""
LARGE = Decoder(layers=2, hidden=320, heads=8, vocab=1536, context=128, biases=True, positions=True)
"""A model whose step is spent on matrix products, and reads memory between them."""
_MICROBATCHES, _ROWS = 4, 8
"""Micro-batches and sequences of a step of either model."""
_SMALL_STEPS, _MIDDLE_STEPS, _LARGE_STEPS = 50, 25, 12
_TURNS = 10
"""Repetitions after which the fitted figures no longer change each other."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of forward and backward of the models, which all ranks of a host run at once."""

    small: float
    middle: float
    large: float
    divided: float | None
    """Of the model of middle size, its layers divided over the ranks; None for one rank, and where its heads
    cannot be divided."""


def measure_steps(group: Group, timer: Timer, *, divides: bool) -> StepSeconds:
    """Return the median seconds of steps; all ranks of the group call it. Communication: barriers, `tp`.

    `divides`: whether the group has all ranks of the world, over which a model can be divided.
    """
    divided = None
    if divides and group.size > 1 and MIDDLE.heads % group.size == 0:
        divided = timer(model_step(MIDDLE, group, tp=group.size), times=_MIDDLE_STEPS)
    return StepSeconds(
        timer(model_step(SMALL, group), times=_SMALL_STEPS),
        timer(model_step(MIDDLE, group), times=_MIDDLE_STEPS),
        timer(model_step(LARGE, group), times=_LARGE_STEPS),
        divided,
    )


def model_step(sizes: Decoder, group: Group, *, tp: int = 1) -> Callable[[], object]:
    """Return a function that runs forward and backward of a model on the CPU, on each rank or over `tp`.

    It returns when all ranks of the group are done. Communication: that of `tp`, and a barrier.
    """
    model = gpt2(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        vocab=sizes.vocab,
        context=sizes.context,
    )
    plan = _plan(tp)
    engine = parallelize(model, plan, Mesh(plan, device="cpu", alone=tp == 1), loss=cross_entropy)
    tokens = torch.zeros(_ROWS, sizes.context, dtype=torch.int64)

    def run() -> None:
        engine.forward_backward(tokens, tokens)
        barrier(group, checked=False).wait()

    return run


def predicted_seconds(sizes: Decoder, hardware: Hardware, *, tp: int = 1) -> float:
    """Return the seconds predicted for forward and backward of a model, as `model_step` runs them."""
    found = predict(sizes, _plan(tp), hardware, rows=_ROWS)
    return found.step_seconds - found.breakdown["optimizer"]


def _plan(tp: int) -> Plan:
    return Plan(tp=tp, microbatches=_MICROBATCHES)


def fitted_to_steps(hardware: Hardware, steps: StepSeconds) -> Hardware:
    """Return `hardware` with fixed costs and a rate of products' bytes that predict the measured steps.

    From the small model's follows the fixed cost of an operation; from the large one's at which rate products
    read and write, as their operands are not in the caches that the products alone find them in; from the
    divided one's the fixed cost of a collective, with the time that one rank waits for the slower one.
    """
    for _ in range(_TURNS):  # each has a little influence on the other model's step
        kernel = _at_which(steps.small, partial(_small, hardware))
        hardware = _with(hardware, kernel=max(kernel, 0.0))
        inverse = _at_which(steps.large, partial(_large, hardware))
        hardware = _with(hardware, operands=1 / max(inverse, 1.0))
    if steps.divided is not None:
        slower = steps.middle / predicted_seconds(MIDDLE, hardware)
        communicating = steps.divided - slower * _divided(hardware, 0.0)
        collective = communicating / (_divided(hardware, 1.0) - _divided(hardware, 0.0))
        hardware = _with(hardware, collective=max(collective, 0.0))
    return hardware


def _small(hardware: Hardware, kernel: float) -> float:
    return predicted_seconds(SMALL, _with(hardware, kernel=kernel))


def _large(hardware: Hardware, inverse: float) -> float:
    return predicted_seconds(LARGE, _with(hardware, operands=1 / inverse))


def _divided(hardware: Hardware, collective: float) -> float:
    return predicted_seconds(MIDDLE, _with(hardware, collective=collective), tp=hardware.devices)


def _at_which(wanted: float, seconds: Callable[[float], float]) -> float:
    """Return the value at which `seconds`, linear in it, is `wanted`."""
    first, second = seconds(1.0), seconds(2.0)
    return 1.0 + (wanted - first) / (second - first)


def _with(hardware: Hardware, **figures: float) -> Hardware:
    return replace(hardware, efficiency=replace(hardware.efficiency, **figures))
