"""Measured rates of this machine: products, attention and other operations, and collectives of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from plait.estimate.measurement.timer import Timer
from plait.plan.plan import Precision
from plait.ranks.accelerator import StreamEvent, is_accelerator, synchronize
from plait.ranks.collectives import all_gather, all_reduce, all_to_all, barrier
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.tensor.dtypes import DTYPES

_LONG = 0.02
"""Seconds from which on an operation is long enough to be timed."""
_DEPTHS = (64, 1024)
"""Lengths of the summed dim at which products are timed."""
_SMALL_OPERATIONS = 1000
_BIAS = 512
"""Elements of a small parameter, of which a layer has as many as of large ones."""


@dataclass(frozen=True)
class DeviceRates:
    """Measured figures of a device. Rates in operations or bytes a second, times in seconds."""

    products: Mapping[str, float]
    """By precision: of a large matrix product of `side` × `side` × `side`."""
    side: int
    half_depth: float
    """Length of the summed dim at which a product reaches half the rate of a long one; 0 on a CPU, where
    predictions add the time of a product's bytes."""
    attention: float
    """Of causal attention in one kernel, counting half of the scores; `attention_backward`: its backward."""
    attention_backward: float
    memory_bandwidth: float
    """Of additions, which read and write."""
    optimizer: float
    """Of a step of AdamW, in bytes as predictions count them."""
    elementwise: float
    """Of a norm and a residual connection, forward and backward, in bytes likewise."""
    activation: float
    """Of GELU, forward and backward, in bytes likewise."""
    kernel: float
    """Time of a GPU for an element-wise operation on few elements; on the CPU 0, see `calibrate`."""
    launch: float
    """Time in which the host starts such an operation on a GPU; on the CPU 0."""


def measure_device(timer: Timer) -> DeviceRates:
    """Measure and return the rates of the timer's device: of products, attention, memory and others.

    There is no communication.
    """
    device = timer.device
    precisions: tuple[Precision, ...] = ("bf16", "fp32", "fp64")
    best: Precision = "bf16" if is_accelerator(device) else "fp32"
    side = _side(best, timer)
    rates: Mapping[str, float] = {
        one: 2 * side**3 / timer(_product(device, one, side, side)) for one in precisions
    }
    forward, backward, operations = _attention(best, timer)
    elementwise, activation = _elementwise(best, timer)
    elements = 1 << (26 if is_accelerator(device) else 23)
    one, other = (torch.zeros(elements, device=device) for _ in range(2))
    bandwidth = 3 * one.nbytes / timer(lambda: torch.add(one, other, out=one))
    kernel, launch = _small_operation(device) if is_accelerator(device) else (0.0, 0.0)
    return DeviceRates(
        products=rates,
        side=side,
        half_depth=_half_depth(best, side, timer) if is_accelerator(device) else 0.0,
        attention=operations / forward,
        attention_backward=2.5 * operations / backward,
        memory_bandwidth=bandwidth,
        optimizer=_optimizer(timer),
        elementwise=elementwise,
        activation=activation,
        kernel=kernel,
        launch=launch,
    )


def _product(device: torch.device, precision: Precision, side: int, depth: int) -> Callable[[], Tensor]:
    a, b = (torch.ones(side, depth, dtype=DTYPES[precision], device=device) for _ in range(2))
    return lambda: a @ b.t()


def _side(precision: Precision, timer: Timer) -> int:
    """Return the side of square matrices whose product takes long enough."""
    device, side, most = timer.device, 256, 1 << 14
    while side < most and timer(_product(device, precision, side, side), times=3) < _LONG:
        side *= 2
    return side


def _half_depth(precision: Precision, side: int, timer: Timer) -> float:
    shallow, deep = (timer(_product(timer.device, precision, side, depth)) for depth in _DEPTHS)
    slope = max((deep - shallow) / (_DEPTHS[1] - _DEPTHS[0]), 1e-12)
    return max(shallow / slope - _DEPTHS[0], 0.0)


def _attention(precision: Precision, timer: Timer) -> tuple[float, float, float]:
    """Return the seconds of forward and backward of causal attention, and the operations of the forward."""
    device = timer.device
    rows, heads, length, width = (8, 16, 2048, 64) if is_accelerator(device) else (1, 4, 512, 64)
    given = torch.ones(3, rows, heads, length, width, dtype=DTYPES[precision], device=device)
    q, k, v = (one.clone().requires_grad_() for one in given)

    def run() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        output = run()
        torch.autograd.grad(output, (q, k, v), output)

    forward = timer(run)
    backward = max(timer(both) - forward, forward / 2)
    return forward, backward, 2 * 2 * rows * heads * length**2 * width / 2


def _optimizer(timer: Timer) -> float:
    """Measure clipping and an AdamW step; return the bytes a second that they move.

    Gradients are read for their norm and again, parameters and moments read and written.
    """
    device = timer.device
    count, elements = (16, 1 << 22) if is_accelerator(device) else (32, 1 << 17)  # as large as a layer's
    sizes = [elements, _BIAS] * count
    parameters = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW(parameters)

    def step() -> None:
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return 8 * 4 * sum(sizes) / timer(step)


def _elementwise(precision: Precision, timer: Timer) -> tuple[float, float]:
    """Measure layer norm with a residual add, and GELU; return the bytes a second that each moves.

    Forward and backward. Of `n` bytes, a norm reads and writes 2 n and 4 n in its backward, a residual
    connection 3 n and 2 n, GELU 2 n and 3 n: as `plait.estimate.time.decoder_operations` counts them.
    """
    device = timer.device
    tokens, width = (16384, 4096) if is_accelerator(device) else (512, 512)
    few, many = (
        torch.randn(tokens, features, dtype=DTYPES[precision], device=device, requires_grad=True)
        for features in (width, 4 * width)
    )
    gradients = torch.ones_like(few), torch.ones_like(many)

    def norm() -> None:
        torch.autograd.grad(few + functional.layer_norm(few, [width]), few, gradients[0])

    def activation() -> None:
        torch.autograd.grad(functional.gelu(many, approximate="tanh"), many, gradients[1])

    return 11 * few.nbytes / timer(norm), 5 * many.nbytes / timer(activation)


def _small_operation(device: torch.device) -> tuple[float, float]:
    """Return a GPU's and its host's seconds of an element-wise operation on few elements."""
    few = torch.zeros(8, device=device)

    def several() -> None:
        for _ in range(_SMALL_OPERATIONS):
            few.add_(1.0)

    large = _product(device, "fp32", 1 << 13, 1 << 13)
    several()
    synchronize(device)
    for _ in range(8):  # long enough for the host to be ahead of the device
        large()
    first, start = StreamEvent(device, timed=True), time.perf_counter()
    several()
    launch = (time.perf_counter() - start) / _SMALL_OPERATIONS
    last = StreamEvent(device, timed=True)
    synchronize(device)
    return last.milliseconds_since(first) / 1e3 / _SMALL_OPERATIONS, launch


_SMALL, _SMALL_REPEATS, _REPEATS = 256, 60, 20
"""Elements of a small collective, and how often it and others are timed."""
_PRODUCTS = 20
"""Matrix products in a turn that has a small all-reduce after each."""
_Start = Callable[[Tensor], Handle[Tensor]]
"""Starts a collective of a tensor."""


@dataclass(frozen=True)
class LinkRates:
    """Latency and bandwidth of a group's collectives, as if each were sent around a ring of its ranks."""

    latency: float
    """Seconds of each step of an all-reduce."""
    bandwidth: float
    """Bytes a second that each rank sends in one."""
    start: float
    """Seconds that a collective takes besides its steps and its bytes, and waits for the slower rank, between
    operations that take about a millisecond."""
    all_to_all: float
    """The bandwidth of an all-to-all, as a fraction of `bandwidth`."""


def measure_links(group: Group, timer: Timer) -> LinkRates | None:
    """Measure and return latency and bandwidth of a group, on all its ranks at once; None for one rank.

    Communication: all-reduces, all-gathers and all-to-alls over the group, of 1 kB, and of 16 MB (on GPUs
    256 MB). As in a step, the ranks do not compare their calls, and do not begin a small one at once.
    """
    ranks, device = group.size, timer.device
    if ranks == 1:
        return None
    large = (1 << (26 if is_accelerator(device) else 22)) // ranks * ranks
    small = _SMALL * ranks
    reduce = partial(all_reduce, group=group, checked=False)
    swap = partial(all_to_all, group=group, checked=False)
    timed = partial(_seconds, group, timer)
    short, long = (timed(reduce, elements) for elements in (small, large))
    gather = timed(partial(all_gather, group=group, checked=False), _SMALL)
    # An all-reduce is two passes of n - 1 steps, an all-gather is one of them.
    latency = max(short - gather, 0.0) / (ranks - 1)
    start = max(_between_products(group, device, small) - 2 * (ranks - 1) * latency, 0.0)
    bandwidth = 2 * _sent(large, ranks) / max(long - short, long / 10)
    swap_short, swap_long = (timed(swap, elements) for elements in (small, large))
    swapping = _sent(large, ranks) / max(swap_long - swap_short, swap_long / 10)
    return LinkRates(latency, bandwidth, start, min(swapping / bandwidth, 1.0))


def _sent(elements: int, ranks: int) -> float:
    """Return the bytes that a rank sends to others of a float32 tensor that has a part for each rank."""
    return 4 * elements * (ranks - 1) / ranks


def _between_products(group: Group, device: torch.device, elements: int) -> float:
    """Return the seconds that a small all-reduce after each matrix product adds to it."""
    side = 4096 if is_accelerator(device) else 320
    factor, tensor = torch.ones(side, side, device=device), torch.zeros(elements, device=device)

    def turn(*, reduces: bool) -> float:
        barrier(group).wait()
        began = time.perf_counter()
        for _ in range(_PRODUCTS):
            factor @ factor
            if reduces:
                all_reduce(tensor, group, checked=False).wait()
        synchronize(device)
        return (time.perf_counter() - began) / _PRODUCTS

    pairs = [(turn(reduces=True), turn(reduces=False)) for _ in range(_REPEATS)]
    return max(median(together - apart for together, apart in pairs), 0.0)


def _seconds(group: Group, timer: Timer, start: _Start, elements: int) -> float:
    tensor = torch.zeros(elements, device=timer.device)
    times = _SMALL_REPEATS if elements <= _SMALL * group.size else _REPEATS
    return timer(lambda: start(tensor).wait(), times=times, before=lambda: barrier(group).wait())
