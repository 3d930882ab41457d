"""plait's side: the plan, a rank's part of its step, and the memory that is predicted for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from work import LIMIT, Trainee, Work, build, optimizer_of, with_values

import plait


def plan_of(work: Work, ranks: int, fields: Mapping[str, Any]) -> plait.Plan:
    """Return the plan that cuts the batch of `ranks` GPUs into micro-batches as large as the peers'."""
    microbatches = work.microbatches * ranks // fields.get("dp", 1)
    formats = {"precision": "bf16", "master_precision": "bf16"}  # as the peers' models in bf16
    return plait.Plan(microbatches=microbatches, **(formats | fields))


def woven(
    work: Work, ranks: int, fields: Mapping[str, Any], device: torch.device, timeout: float
) -> tuple[Trainee, plait.Mesh]:
    """Return the step of plait and its mesh, whose operations wait for at most `timeout` seconds."""
    plan = plan_of(work, ranks, fields)
    mesh = plait.Mesh(plan, timeout=timeout)
    assert mesh.device.type == device.type
    dtype = torch.bfloat16 if plan.master_precision == "bf16" else torch.float32
    model = with_values(work, mesh.device, dtype)
    engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
    optimizer = optimizer_of(engine.parameters())

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
        return engine.forward_backward(inputs, targets)

    def update() -> Tensor:
        return engine.step(optimizer, LIMIT)

    return Trainee(mesh.index("dp"), plan.dp, forward_backward, update, optimizer), mesh


def predicted(work: Work, ranks: int, fields: Mapping[str, Any], device: torch.device) -> list[int]:
    """Return, for each rank of `pp`, the predicted peak of a step's forward and backward, in bytes."""
    plan = plan_of(work, ranks, fields)
    rows = work.rows * plan.microbatches
    return [rank.most for rank in plait.memory(build(work), plan, rows=rows, device=device.type).ranks]
