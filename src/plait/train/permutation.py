"""A permutation of 0 … n−1 that can be asked for one place at a time, without storing n numbers.

A Feistel network permutes the next power of four; a place that lands beyond n is sent through again until
it lands inside (cycle walking), which keeps the map one to one. Source: Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002. The mixing function is the finaliser of SplitMix64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_ROUNDS = 6


def permute(places: NDArray[Any], count: int, seed: int, epoch: NDArray[Any]) -> NDArray[np.int64]:
    """Map each of `places`, `[n]` below `count`, one to one to a number below `count`.

    `seed` and `epoch`, `[n]`, choose which of the permutations each place is sent through.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    start = np.full(len(places), seed % 2**64, dtype=np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64))
    result = places.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        result[outside] = _network(result[outside], keys[outside], half)
        outside = result >= count
    return result.astype(np.int64)


def _network(values: Words, keys: Words, half: np.uint64) -> Words:
    """Send numbers of 2 × `half` bits through the network, one to one."""
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(turn))) & mask)
    return (left << half) | right


def _mix(words: Words) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
