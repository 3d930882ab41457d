"""Training that is saved by one plan and goes on under another, in the ranks of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import plait
from parity.case import Case
from plait.plan.plan import Plan

ROWS = 8
"""Of each step's batch."""


def in_a_rank(case: Case, plan: Plan, source: Path | None, target: Path | None, steps: range) -> list[float]:
    """The losses of `steps`, from the checkpoint `source` on; what they end with is saved as `target`."""
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=3)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    if source is not None:
        plait.load(engine, optimizer, source)
    losses = train(case, engine, optimizer, steps)
    engine.check_replicas(optimizer)
    if target is not None:
        plait.save(engine, optimizer, target)
    return losses


def train(case: Case, engine: plait.Engine, optimizer: Any, steps: range) -> list[float]:
    """Do `steps`, each with a batch of its own."""
    losses = []
    for step in steps:
        inputs, targets = case.draw(ROWS, torch.Generator().manual_seed(step))
        rows = slice(*(ROWS // engine.plan.dp * (engine.mesh.index("dp") + end) for end in (0, 1)))
        losses.append(engine.forward_backward(inputs[rows], targets[rows]).item())
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
    return losses
