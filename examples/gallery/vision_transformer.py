"""A vision transformer on two data-parallel ranks, each of which keeps half of all state (ZeRO 3).

.venv/bin/python examples/gallery/vision_transformer.py

The task: on which quarter of a noisy image is the bright square?
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import plait
from plait.loop import History

PLAN = plait.Plan(dp=2, strategy="full", microbatches=2)
SIZE, PATCH, WIDTH, HEADS, STEPS = 16, 4, 32, 4, 30


class Patches(nn.Module):
    """Images `[rows, 1, size, size]` to tokens `[rows, patches, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.position = nn.Parameter(0.3 * torch.randn((SIZE // PATCH) ** 2, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.joined, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.joined(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x).mean(dim=1))


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same values on every rank
    return nn.Sequential(Patches(), Attention(), MLP(), Attention(), MLP(), Head())


def make_images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    quarter = torch.randint(4, (count,), generator=generator)
    for image, number in zip(images, quarter.tolist(), strict=True):
        top, left = (8 * (number // 2) + 2, 8 * (number % 2) + 2)
        image[0, top : top + 4, left : left + 4] += 3.0
    return TensorDataset(images, quarter)


def is_correct(output: Tensor, targets: Tensor) -> Tensor:
    return output.argmax(dim=1) == targets


def train() -> tuple[list[float], float, int]:
    """Return the losses, the accuracy on unseen images, and the number of parameters on this rank."""
    history = History()
    result = plait.fit(
        build_model(),
        PLAN,
        plait.Loader(make_images(1024, seed=0), batch=64),
        steps=STEPS,
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.95)),
        learning_rate=plait.loop.warmup_cosine(1e-2, steps=STEPS, warmup=4),
        clip=1.0,
        validation=plait.Loader(make_images(256, seed=1), batch=256, shuffle=False),
        metrics={"accuracy": is_correct},
        callbacks=[history],
    )
    held = sum(parameter.numel() for parameter in result.engine.parameters())
    return [row["loss"] for row in history.rows], history.rows[-1]["validation_accuracy"], held


def main(ranks_as: str = "processes") -> None:
    losses, accuracy, held = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    whole = sum(parameter.numel() for parameter in build_model().parameters())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"{accuracy:.0%} of unseen images are right; a rank holds {held:,} of {whole:,} parameters")
    images, quarters = make_images(16, seed=2).tensors
    print(plait.verify(build_model, PLAN, images, quarters, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
