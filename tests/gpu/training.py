"""What a rank does in the tests marked `gpu`: steps of the parity tests, with results in CPU memory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parity import woven
from parity.case import Case, Recipe
from parity.outcome import Outcome
from plait.plan.plan import Plan

RECIPE = Recipe(steps=2, optimizer="sgd")
"""The second step shows what the first one leaves, such as the optimizer's state."""


def trained(case: Case, plan: Plan) -> Outcome:
    """Train on this rank's device."""
    return on_cpu(woven.train(case, plan, RECIPE))


def trained_in_a_group_with_device_id(case: Case, plan: Plan, device: str, store: str) -> Outcome:
    """The same in a process group that was given a `device_id`; on CPUs, which have none, in a new group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Leaving closes connections: not while another rank still opens its own.
    Path(f"{store}-{rank}").touch()
    while not all(Path(f"{store}-{other}").exists() for other in range(size)):
        time.sleep(0.001)
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )
    return trained(case, plan)


def on_cpu(outcome: Outcome) -> Outcome:
    """A copy of what a run gave, to send to another process."""

    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    return replace(outcome, gradients=copied(outcome.gradients), parameters=copied(outcome.parameters))
