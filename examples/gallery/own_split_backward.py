"""A layer that splits its backward itself, under a zero-bubble schedule; and how a mistake in it is found.

.venv/bin/python examples/gallery/own_split_backward.py

A grouped linear is no `nn.Linear`: autograd would compute its weight gradient in the action `I`. With three
methods of its own it is computed in `W`; there is nothing to inherit from or to register. Plain PyTorch, an
evaluation and the reference of `plait.verify` call `forward`.
"""

from functools import partial

import torch
from torch import Tensor, nn

import plait

PLAN = plait.Plan(pp=2, schedule="zb-h1", microbatches=4)
WIDTH, GROUPS, ROWS, STEPS = 32, 4, 64, 40


class GroupedLinear(nn.Module):
    """`[rows, width]` to the same; each group of features is mixed by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // GROUPS
        self.weight = nn.Parameter(torch.randn(GROUPS, size, size) / size**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (GROUPS, -1))
        return torch.einsum("rgi,goi->rgo", groups, self.weight).flatten(-2) + self.bias

    def split_forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor]]:  # F: output, what to save
        return self.forward(x), (x,)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:  # I: the previous stage waits for it
        groups = gradient.unflatten(-1, (GROUPS, -1))
        return torch.einsum("rgo,goi->rgi", groups, self.weight).flatten(-2)

    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor) -> dict[str, Tensor]:  # W: no stage waits for it
        groups, inputs = (values.unflatten(-1, (GROUPS, -1)) for values in (gradient, x))
        return {"weight": torch.einsum("rgo,rgi->goi", groups, inputs), "bias": gradient.sum(dim=0)}


class Mistaken(GroupedLinear):
    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor) -> dict[str, Tensor]:
        right = GroupedLinear.weight_gradients(gradient, x)
        return {**right, "weight": right["weight"].transpose(1, 2)}


def build_model(layer: type[GroupedLinear] = GroupedLinear) -> nn.Sequential:
    torch.manual_seed(0)  # the same values on every rank
    inner = (one for _ in range(4) for one in (layer(), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(nn.Linear(8, WIDTH), *inner, nn.Linear(WIDTH, 1))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    return inputs, (inputs[:, :1] * inputs[:, 1:2]).sign()


def train() -> list[float]:
    engine = plait.parallelize(build_model(), PLAN, plait.Mesh(PLAN), loss=nn.MSELoss())
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.0), lr=5e-3)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*make_batch(step)).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    return losses


def main(ranks_as: str = "processes") -> None:
    losses = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    inputs, targets = make_batch(0)
    for layer in (GroupedLinear, Mistaken):
        build = partial(build_model, layer)
        report = plait.verify(build, PLAN, inputs, targets, nn.MSELoss(), ranks_as=ranks_as)
        print(f"{layer.__name__}: {report.headline()}")
        if report.first is not None:
            print(f"likely: {report.first.cause}")


if __name__ == "__main__":
    main()
