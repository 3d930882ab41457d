"""A small run that takes snapshots and can be ended and started again, on any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import plait

ROWS, CONTEXT = 8, 8


class Ended(NamedTuple):
    """How a rank's run ended."""

    first: int | None
    """The step of the snapshot that it went on from."""
    losses: list[float]
    bytes_copied: int
    parameters: dict[str, torch.Tensor]
    """Shards of this rank."""


def make_run(
    plan: plait.Plan, folder: Path, every: int = 1, owned: bool = False, **options: Any
) -> tuple[Any, Any, plait.Snapshots]:
    mesh = plait.Mesh(plan)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=32, context=CONTEXT).double()
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer: Any = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    if owned:
        optimizer = plait.Owned(torch.optim.AdamW, engine, lr=1e-2)
    options = {"name": "run", "folder": folder} | options
    return engine, optimizer, plait.Snapshots(engine, optimizer, every=every, **options)


def step_once(engine: Any, optimizer: Any, step: int) -> float:
    tokens = torch.randint(32, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    size = ROWS // engine.mesh.size("dp")
    share = tokens[engine.mesh.index("dp") * size :][:size]
    loss = engine.forward_backward(share[:, :-1], share[:, 1:]).item()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def train(plan: plait.Plan, folder: Path, steps: int, every: int = 1, **options: Any) -> Ended:
    """Go on from memory, if there is a snapshot, and end after `steps` steps without removing it."""
    engine, optimizer, snapshots = make_run(plan, folder, every, **options)
    found = snapshots.restore()
    losses = []
    for step in range(0 if found is None else found.step, steps):
        losses.append(step_once(engine, optimizer, step))
        snapshots.step(step + 1, {"seen": step + 1})
    snapshots.finish()
    assert found is None or found.state == {"seen": found.step}
    snapshots.release()
    parameters = {name: one.detach().clone() for name, one in engine.named_parameters()}
    return Ended(None if found is None else found.step, losses, snapshots.bytes_copied, parameters)
