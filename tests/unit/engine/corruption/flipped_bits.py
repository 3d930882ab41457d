"""Bits that flip in a tensor's memory, unseen by torch, and engines in which they do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import plait
from plait.engine import Engine
from plait.engine.corruption.word_checksums import WordChecksums
from plait.plan.plan import Plan

Optimizer = torch.optim.Optimizer
SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "context": 8}


def flip(tensor: Tensor, byte: int, bit: int) -> None:
    """Flip one bit of a tensor that lies side by side, as a faulty memory would."""
    assert 0 <= byte < tensor.nbytes
    cell = ctypes.c_uint8.from_address(tensor.data_ptr() + byte)
    cell.value ^= 1 << bit


@contextmanager
def flipped(tensor: Tensor, byte: int, bit: int) -> Iterator[None]:
    """A bit has flipped within the context."""
    flip(tensor, byte, bit)
    try:
        yield
    finally:
        flip(tensor, byte, bit)


class Reading(NamedTuple):
    """A computation of sums."""

    bytes: int
    calls: int
    """Of tensors that are added up, one by one."""


@contextmanager
def counted_sums() -> Iterator[list[Reading]]:
    """Yield a list of what each computation of sums reads within the context, on all threads."""
    counts: list[Reading] = []
    compute = WordChecksums.compute

    def counting(self: WordChecksums) -> Tensor:
        counts.append(Reading(self.bytes, len(self._sums) + len(self._copied)))
        return compute(self)

    with patch.object(WordChecksums, "compute", counting):
        yield counts


def adamw(engine: Engine) -> Optimizer:
    return torch.optim.AdamW(engine.parameter_groups(0.1), lr=1e-3)


def engine_of(
    plan: Plan, make: Callable[[Engine], Optimizer] = adamw, **options: Any
) -> tuple[Engine, Optimizer]:
    """A small GPT of a plan, and its optimizer."""
    model = plait.models.gpt2(**SIZES, **options)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    return engine, make(engine)


def batch(engine: Engine, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's tokens of a step."""
    every = torch.randint(32, (engine.plan.dp, rows, 9), generator=torch.Generator().manual_seed(step))
    tokens = every[engine.mesh.index("dp")]
    return tokens[:, :-1], tokens[:, 1:]
