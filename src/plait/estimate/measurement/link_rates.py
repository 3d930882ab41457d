"""`measure_links`: latency and bandwidth of collectives over a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from plait.estimate.measurement.timer import Timer
from plait.ranks.collectives import all_gather, all_reduce, all_to_all, barrier
from plait.ranks.device import is_accelerator, synchronize
from plait.ranks.group import Group
from plait.ranks.handle import Handle

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
    """Return the rates of a group, None where it has one rank. All its ranks call it.

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
    """Return the bytes that a rank sends to others of a float32 tensor that has a piece for each rank."""
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
