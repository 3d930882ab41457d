"""Four workers of Ray Train train over a plan of two stages; each prints its losses."""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train() -> list[float]:
    """Return the losses of four steps of a rank, in the world that Ray has made."""
    import torch

    import plait

    plan = plait.Plan(pp=2, tp=2, microbatches=2)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=64, context=8)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    tokens = torch.arange(4 * 9).reshape(4, 9) % 64
    losses = []
    for _ in range(4):
        losses.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def worker(settings: dict[str, Any]) -> None:
    """Train by `plait.launch`, which calls the function in the ranks that Ray has started."""
    import torch.distributed as dist

    import plait

    losses = plait.launch(train)
    if dist.get_rank() == 0:
        with open(settings["file"], "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    scaling = ScalingConfig(num_workers=4, use_gpu=False)
    TorchTrainer(worker, train_loop_config={"file": sys.argv[1]}, scaling_config=scaling).fit()
