"""A recurrent model on two pipeline stages with a zero-bubble schedule.

.venv/bin/python examples/gallery/recurrent_model.py

The task: keep a bit. Some tokens write 0 or 1, the others are noise; which bit was written last? The loop
over positions calls an `nn.Linear`, whose weight gradients, one a position, are computed in the action `W`
of the schedule. An `nn.GRU` runs too; its weight gradients are computed in `I`.
"""

import torch
from torch import Tensor, nn

import plait

PLAN = plait.Plan(pp=2, schedule="zb-h1", microbatches=4)
WRITES, NOISE, LENGTH, WIDTH, ROWS, STEPS = 2, 6, 12, 32, 64, 20


class Recurrent(nn.Module):
    """A gated recurrent layer over dim 1 of `[rows, length, width]`, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 2 * WIDTH)
        self.state = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for given in self.inputs(self.norm(x)).unbind(dim=1):
            gate, candidate = (given + self.state(state)).chunk(2, dim=-1)
            state = torch.lerp(state, candidate.tanh(), gate.sigmoid())
            states.append(state)
        return x + torch.stack(states, dim=1)


def build_model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(WRITES + NOISE, WIDTH), Recurrent(), Recurrent(), nn.Linear(WIDTH, WRITES)
        )


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and at each position the last of 0 and 1 among them so far."""
    tokens = torch.randint(WRITES + NOISE, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens[:, 0] %= WRITES
    position = torch.where(tokens < WRITES, torch.arange(LENGTH), 0).cummax(dim=1).values
    return tokens, tokens.gather(1, position)


def train() -> tuple[list[float], float, list[str]]:
    """Return the losses, the accuracy on an unseen batch, and the actions of each rank in a step."""
    engine = plait.parallelize(build_model(), PLAN, plait.Mesh(PLAN), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.0), lr=1e-2)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*make_batch(step)).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    tokens, bits = make_batch(STEPS)
    right = (engine.output(tokens).argmax(dim=-1) == bits).double().mean().item()
    return losses, right, [" ".join(row) for row in engine.schedule.order]


def main(ranks_as: str = "processes") -> None:
    losses, right, actions = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"{right:.0%} of unseen bits are right")
    for rank, row in enumerate(actions):
        print(f"rank {rank}: {row}")
    tokens, bits = make_batch(0)
    print(plait.verify(build_model, PLAN, tokens, bits, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
