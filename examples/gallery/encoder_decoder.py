"""An encoder and decoder on two pipeline stages: the encoder's memory travels with the decoder's values.

.venv/bin/python examples/gallery/encoder_decoder.py

The task: write a sequence of digits backwards. The values between layers are a pair, (memory, decoded).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait

PLAN = plait.Plan(pp=2, schedule="1f1b", microbatches=4)
DIGITS, LENGTH, WIDTH, HEADS, ROWS, STEPS = 10, 6, 32, 4, 64, 40
Pair = tuple[Tensor, Tensor]


class Embed(nn.Module):
    """`{"source": tokens, "decoded": tokens}` to the pair of both, `[rows, length, width]` each."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(DIGITS + 1, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Pair:
        position = self.position(torch.arange(LENGTH, device=batch["source"].device))
        return self.token(batch["source"]) + position, self.token(batch["decoded"]) + position


class Attention(nn.Module):
    """Attention of the values in `x` to `memory`, or to themselves."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal, self.norm = causal, nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        read = normed if memory is None else memory
        query, key, value = (
            values.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for values in (self.query(normed), self.key(read), self.value(read))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        wide = 4 * WIDTH
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, pair: Pair) -> Pair:
        memory, decoded = pair
        return self.mlp(self.attention(memory)), decoded


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross, self.mlp = Attention(causal=True), Attention(), MLP()

    def forward(self, pair: Pair) -> Pair:
        memory, decoded = pair
        return memory, self.mlp(self.cross(self.attention(decoded), memory))


class Head(nn.Linear):
    def forward(self, pair: Pair) -> Tensor:
        return super().forward(pair[1])


def build_model() -> nn.Sequential:
    """Return the model without values: each rank fills its own stage, by the names of modules and a seed."""
    with torch.device("meta"):
        layers = [Embed(), EncoderLayer(), EncoderLayer(), DecoderLayer(), DecoderLayer()]
        return nn.Sequential(*layers, Head(WIDTH, DIGITS))


def make_batch(step: int) -> tuple[dict[str, Tensor], Tensor]:
    digits = torch.randint(DIGITS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    backwards = digits.flip(1)
    start = torch.full((ROWS, 1), DIGITS)  # the decoder sees what it has written, after a token of its own
    return {"source": digits, "decoded": torch.cat([start, backwards[:, :-1]], dim=1)}, backwards


def train() -> tuple[list[float], float, list[str]]:
    """Return the losses, the accuracy on an unseen batch, and the layers of this rank."""
    engine = plait.parallelize(build_model(), PLAN, plait.Mesh(PLAN), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=5e-3)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*make_batch(step)).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    inputs, backwards = make_batch(STEPS)
    right = (engine.output(inputs).argmax(dim=-1) == backwards).double().mean().item()
    return losses, right, sorted({name.partition(".")[0] for name, _ in engine.named_parameters()})


def main(ranks_as: str = "processes") -> None:
    results = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)
    losses, right, _ = results[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"{right:.0%} of unseen digits are right")
    for rank, (_, _, layers) in enumerate(results):
        print(f"rank {rank} has layers {', '.join(layers)}")
    inputs, targets = make_batch(0)
    print(plait.verify(build_model, PLAN, inputs, targets, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
