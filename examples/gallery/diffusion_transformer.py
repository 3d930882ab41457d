"""A diffusion transformer on two tensor-parallel ranks: each computes half of the heads and features.

.venv/bin/python examples/gallery/diffusion_transformer.py

The model learns the velocity from images to noise (rectified flow), given the time and the class: a bright
left or right half. A few Euler steps with `engine.output` then draw images from noise.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from plait.engine import Engine
from plait.rules import column, row

PLAN = plait.Plan(tp=2, microbatches=2)
SIZE, PATCH, WIDTH, HEADS, ROWS, STEPS, EULER = 8, 2, 32, 4, 64, 40, 8
RULES = {
    "*.query": column.by("heads"),
    "*.key": column.by("heads"),
    "*.value": column.by("heads"),
    "*.output": row.by("heads"),
    "*.up": column,
    "*.down": row,
}
Values = dict[str, Tensor]


class Embed(nn.Module):
    """`{"image", "time", "class"}` to `{"x": [rows, patches, width], "condition": [rows, width]}`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH**2, WIDTH)
        self.position = nn.Embedding((SIZE // PATCH) ** 2, WIDTH)
        self.time, self.label = nn.Linear(8, WIDTH), nn.Embedding(2, WIDTH)

    def forward(self, batch: Values) -> Values:
        patches = functional.pixel_unshuffle(batch["image"], PATCH).flatten(2).transpose(1, 2)
        x = self.patch(patches) + self.position.weight
        waves = batch["time"][:, None] * 2.0 ** torch.arange(4, device=x.device)
        time = self.time(torch.cat([waves.sin(), waves.cos()], dim=1))
        return {"x": x, "condition": functional.silu(time + self.label(batch["class"]))}


class Block(nn.Module):
    """Attention and an MLP, whose inputs are scaled and shifted, and results gated, by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS  # read by the rules
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Values) -> Values:
        x, condition = values["x"], values["condition"]
        scale, shift, gate, *of_mlp = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attend(self.norm(x) * (1 + scale) + shift)
        scale, shift, gate = of_mlp
        x = x + gate * self.down(functional.gelu(self.up(self.norm(x) * (1 + scale) + shift)))
        return {"x": x, "condition": condition}

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # as many heads as this rank has
            for linear in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.patch = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH**2)

    def forward(self, values: Values) -> Tensor:
        patches = self.patch(self.norm(values["x"])).transpose(1, 2)
        return functional.pixel_shuffle(patches.unflatten(2, (SIZE // PATCH, -1)), PATCH)


def build_model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Embed(), Block(), Block(), Velocity())


def make_batch(step: int) -> tuple[Values, Tensor]:
    """Return images on the way to noise with their time and class, and the velocity."""
    generator = torch.Generator().manual_seed(step)
    label, time = torch.arange(ROWS) % 2, torch.rand(ROWS, generator=generator)
    image = 0.1 * torch.randn(ROWS, 1, SIZE, SIZE, generator=generator)
    image[0::2, :, :, : SIZE // 2] += 1
    image[1::2, :, :, SIZE // 2 :] += 1
    noise = torch.randn(image.shape, generator=generator)
    mixed = torch.lerp(image, noise, time.view(-1, 1, 1, 1))
    return {"image": mixed, "time": time, "class": label}, noise - image


def draw_images(engine: Engine) -> Tensor:
    """Return images of both classes in turns, from noise: time 1 to 0 in equal steps."""
    image = torch.randn(ROWS, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(STEPS))
    for step in range(EULER):
        time = torch.full((ROWS,), 1 - step / EULER)
        image = image - engine.output({"image": image, "time": time, "class": torch.arange(ROWS) % 2}) / EULER
    return image


def train() -> tuple[list[float], Tensor]:
    """Return the losses, and the mean brightness of the drawn images, by class and half."""
    engine = plait.parallelize(build_model(), PLAN, plait.Mesh(PLAN), loss=nn.MSELoss(), rules=RULES)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=5e-3)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*make_batch(step)).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    halves = draw_images(engine).unflatten(3, (2, -1)).mean(dim=(1, 2, 4))
    return losses, torch.stack([halves[0::2].mean(0), halves[1::2].mean(0)])


def main(ranks_as: str = "processes") -> None:
    losses, halves = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    for name, (left, right) in zip(("left", "right"), halves.tolist(), strict=True):
        print(f"drawn for {name}: mean brightness {left:.2f} on the left, {right:.2f} on the right")
    inputs, velocity = make_batch(0)
    report = plait.verify(build_model, PLAN, inputs, velocity, nn.MSELoss(), rules=RULES, ranks_as=ranks_as)
    print(report.headline())


if __name__ == "__main__":
    main()
