"""plait's side: the step of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from work import DECAY, LIMIT, MICROBATCHES, RANKS, RATE, Step, build

import plait
from plait.ranks.group import Counts


def weave(strategy: Any, reduce: Any) -> tuple[Step, Callable[[], Counts]]:
    """What takes a step, and what tells of its traffic."""
    plan = plait.Plan(dp=RANKS, microbatches=MICROBATCHES, strategy=strategy, reduce=reduce)
    mesh = plait.Mesh(plan, device="cpu")
    engine = plait.parallelize(build(), plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine.forward_backward(inputs, targets)
        engine.clip_grad_norm_(LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, engine.traffic
