"""A random permutation of 0 … n−1, computed per element without storing n numbers.

A Feistel network permutes the next power of four; a result of n or more is mapped again until it is below n
(cycle walking), which keeps the map one to one. Source: Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]
_ROUNDS = 6


def permute(positions: NDArray[Any], count: int, seed: int, epoch: NDArray[Any]) -> NDArray[np.int64]:
    """Map each of `positions` (`[n]`, below `count`) to its unique number below `count`.

    `seed` and `epoch`, `[n]`, choose the permutation of each position.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    start = np.full(len(positions), seed % 2**64, dtype=np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64))
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        result[outside] = _network(result[outside], keys[outside], half)
        outside = result >= count
    return result.astype(np.int64)


def _network(values: UInt64s, keys: UInt64s, half: np.uint64) -> UInt64s:
    """Apply the Feistel network to numbers of 2 × `half` bits, one to one."""
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(round_))) & mask)
    return (left << half) | right


def _mix(values: UInt64s) -> UInt64s:
    """Apply the finalizer of SplitMix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
