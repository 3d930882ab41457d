"""Seeding and restoring the random number generators that data are read with: torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int, number: int) -> None:
    """Seed torch, numpy and random for one row or batch of the run."""
    word = int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])
    torch.manual_seed(word)
    random.seed(word)
    np.random.seed(word % 2**32)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager that restores the states of torch's, numpy's and Python's random numbers on the CPU."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
