"""A program whose rank 1 stops in the middle of the second step: `… DEVICE TIMEOUT RANKS_PER_GPU`."""

from __future__ import annotations

import sys
import time

import torch

import plait


def body(timeout: float) -> None:
    """Rank 0 waits for a gradient of its peer, as long as the mesh's timeout."""
    plan = plait.Plan(pp=2, microbatches=2, precision="fp32")
    mesh = plait.Mesh(plan, timeout=timeout)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=32, context=8)
    engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    print(f"rank {mesh.rank} starts with {engine.forward_backward(tokens, tokens).item():.3f}", flush=True)
    if mesh.rank == 1:
        engine.observe(lambda instruction, _: time.sleep(600))
    engine.forward_backward(tokens, tokens).item()


if __name__ == "__main__":
    plait.launch(body, float(sys.argv[2]), device=sys.argv[1], ranks_per_gpu=int(sys.argv[3]))
