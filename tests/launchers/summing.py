"""A run that adds up the number on its command line over all ranks, and prints the results."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import plait


def total(number: float) -> float:
    """Return the sum over the ranks of a mesh."""
    plait.Mesh(dp=dist.get_world_size())
    value = torch.tensor(number)
    dist.all_reduce(value)
    return value.item()


if __name__ == "__main__":
    sums = plait.launch(total, float(sys.argv[1]), device="cpu", timeout=60)
    sys.stdout.write(f"sums {sums}\n")  # one write: ranks share the pipe
