"""A loss of your own: focal loss over all anchors, divided by the number of objects in the whole batch.

.venv/bin/python examples/gallery/own_loss.py

Objects are rare, and some micro-batches have none. Divided by the objects of its own micro-batch, a loss
would weigh those of a micro-batch with few objects more, and be NaN where there are none. So plait asks a
loss for two numbers, each summed over micro-batches and ranks: the total, and what it is divided by. The
loss is that of Lin et al. 2017, "Focal Loss for Dense Object Detection".
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait

PLAN = plait.Plan(dp=2, microbatches=4)
LENGTH, WIDTH, ROWS, STEPS = 48, 16, 32, 40
SHAPE = torch.tensor([1.0, -2.0, 3.0, -2.0, 1.0])
"""What an object looks like in the signal; its anchor is the middle."""


class FocalLoss:
    """`−(1 − p)² log p` of the right answer at each anchor: easy anchors count little."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        wrong = functional.binary_cross_entropy_with_logits(output, targets.to(output), reduction="none")
        return (torch.expm1(-wrong) ** 2 * wrong).sum()

    def weight(self, targets: Tensor) -> Tensor:
        return targets.sum()


def build_model() -> nn.Sequential:
    """Return a detector of `[rows, 1, length]` signals: a logit for each of the `length` anchors."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv1d(1, WIDTH, kernel_size=5, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv1d(WIDTH, 1, kernel_size=1),
            nn.Flatten(),
        )


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return noisy signals `[rows, 1, length]` and 1.0 at the anchors of objects `[rows, length]`."""
    generator = torch.Generator().manual_seed(step)
    objects = (torch.rand(ROWS, LENGTH, generator=generator) < 0.01).float()
    objects[0] = 0.0
    objects[-1, 5::10] = 1.0  # the last rows have more than the others
    noise = 0.3 * torch.randn(ROWS, 1, LENGTH, generator=generator)
    return functional.conv1d(objects[:, None], SHAPE[None, None], padding=2) + noise, objects


def train() -> tuple[list[float], float, list[float]]:
    """Return the losses, the part of unseen objects found, and the objects of each own micro-batch."""
    mesh = plait.Mesh(PLAN)
    engine = plait.parallelize(build_model(), PLAN, mesh, loss=FocalLoss())
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.0), lr=1e-2)
    losses = []
    for step in range(STEPS):
        signals, objects = (whole.chunk(PLAN.dp)[mesh.index("dp")] for whole in make_batch(step))
        losses.append(engine.forward_backward(signals, objects).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    counted = [part.sum().item() for part in objects.chunk(PLAN.microbatches)]
    signals, objects = make_batch(STEPS)
    found = ((engine.output(signals) > 0) & (objects == 1)).sum() / objects.sum()
    return losses, found.item(), counted


def main(ranks_as: str = "processes") -> None:
    results = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)
    losses, found, _ = results[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"{found:.0%} of unseen objects are found")
    for rank, (_, _, counted) in enumerate(results):
        print(f"objects in the micro-batches of rank {rank}: {', '.join(f'{count:g}' for count in counted)}")
    signals, objects = make_batch(0)
    print(plait.verify(build_model, PLAN, signals, objects, FocalLoss(), ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
