"""Tensor-parallel linears as plain layers in a training loop of your own: no plan, no engine.

.venv/bin/python examples/tensor_parallel_layers.py                        starts two local ranks
.venv/bin/torchrun --nproc-per-node 2 examples/tensor_parallel_layers.py   joins torchrun's two

The task: is the product of two numbers positive? Each rank also trains the whole network, to compare.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from plait.ranks.group import Group
from plait.tensor import ColumnParallelLinear, RowParallelLinear

WIDTH, INNER, ROWS, STEPS = 16, 64, 128, 60


class Block(nn.Module):
    """`[rows, width]` to the same. Given a group, each rank holds its part of the inner features."""

    def __init__(self, tp: Group | None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, tp) if tp else nn.Linear(WIDTH, INNER)
        self.down = RowParallelLinear(INNER, WIDTH, tp) if tp else nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(x)))
        return result


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, the same on all ranks of `tp`."""
    numbers = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(step))
    return numbers, (numbers.prod(dim=1) > 0).long()


def train_one(tp: Group | None, device: torch.device) -> tuple[list[float], int]:
    """Return the losses, and the number of parameters on this rank."""
    torch.manual_seed(0)  # the same on every rank: replicated parameters have to start equal
    model = nn.Sequential(nn.Linear(2, WIDTH), Block(tp), Block(tp), nn.Linear(WIDTH, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        numbers, signs = (tensor.to(device) for tensor in make_batch(step))
        loss = functional.cross_entropy(model(numbers), signs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(parameter.numel() for parameter in model.parameters())


def train() -> None:
    mesh = plait.Mesh(tp=2)
    sharded, held = train_one(mesh.group("tp"), mesh.device)
    sums = mesh.traffic.snapshot()["tp"]["all_reduce"]
    whole, all_parameters = train_one(None, mesh.device)
    if mesh.rank == 0:
        print(f"this rank holds {held} of {all_parameters} parameters")
        print(f"{sums.calls / STEPS:.0f} sums over tp a step, {sums.bytes / STEPS:.0f} bytes")
        for step in range(19, STEPS, 20):
            print(f"step {step + 1}: loss {sharded[step]:.6f}, whole {whole[step]:.6f}")


plait.launch(train, ranks=2)
