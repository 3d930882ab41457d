"""`measure_links`: latency and bandwidth of collectives over a group."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from plait.comm.collectives import all_reduce, barrier
from plait.comm.group import Group
from plait.device import is_accelerator, synchronize

_SMALL, _REPEATS = 256, 20
"""Elements of a small all-reduce, and how often each is timed."""


@dataclass(frozen=True)
class LinkRates:
    """Of an all-reduce in a ring: seconds of each of its steps, and bytes a second that each rank sends."""

    latency: float
    bandwidth: float


def measure_links(group: Group, device: torch.device) -> LinkRates | None:
    """Return the rates of a group, None where it has one rank. All its ranks call it.

    Communication: all-reduces over the group, of 1 kB and of 4 MB (on GPUs 256 MB).
    """
    ranks = group.size
    if ranks == 1:
        return None
    large = 1 << (26 if is_accelerator(device) else 20)
    short, long = (_seconds(group, device, elements) for elements in (_SMALL, large))
    # See `plait.prediction.collective_times`: an all-reduce is two passes of n − 1 steps.
    latency = short / (2 * (ranks - 1))
    sending = max(long - short, long / 10)
    return LinkRates(latency, 2 * 4 * large * (ranks - 1) / ranks / sending)


def _seconds(group: Group, device: torch.device, elements: int) -> float:
    tensor = torch.zeros(elements, device=device)
    found = []
    for _ in range(_REPEATS):
        barrier(group).wait()
        start = time.perf_counter()
        all_reduce(tensor, group).wait()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found)
