"""A sparse model trained from scratch: experts on ranks of their own, and the load of each over the steps.

.venv/bin/python examples/gallery/mixture_of_experts.py

Each sequence counts on by a rule of its own, which its first tokens show. A router sends each token to two of
six experts, three on each rank. The balance loss keeps it from sending all to the same ones.
"""

import torch
from torch import Tensor, nn

import plait
from plait.tensor import balance_experts

PLAN = plait.Plan(dp=2, ep=2)
EXPERTS, TOP_K, TOKENS, LENGTH, ROWS, STEPS = 6, 2, 32, 16, 32, 60
STEP_RULES = ((1, 1), (1, 5), (3, 2), (5, 7), (7, 3), (9, 4))
"""A step rule (a, b) goes from token x to (a x + b) modulo 32."""


def build_model() -> nn.Sequential:
    """Return a Llama with experts in each block, and the settings of its routers."""
    model = plait.models.llama(
        layers=2, hidden=48, heads=4, vocab=TOKENS, context=LENGTH, experts=EXPERTS, top_k=TOP_K, inner=32
    )
    balance_experts(model, weight=0.02, z_weight=1e-3)
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return sequences `[rows, length]` and the next token at each position."""
    generator = torch.Generator().manual_seed(step)
    rules = torch.tensor(STEP_RULES)[torch.randint(len(STEP_RULES), (ROWS,), generator=generator)]
    tokens = [torch.randint(TOKENS, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((rules[:, 0] * tokens[-1] + rules[:, 1]) % TOKENS)
    sequences = torch.stack(tokens, dim=1)
    return sequences[:, :-1], sequences[:, 1:]


def train() -> tuple[list[float], float, list[list[int]], int]:
    """Return the losses, the part of unseen tokens that is right, the last loads, and parameters held."""
    mesh = plait.Mesh(PLAN)
    engine = plait.parallelize(build_model(), PLAN, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = (whole.chunk(PLAN.dp)[mesh.index("dp")] for whole in make_batch(step))
        losses.append(engine.forward_backward(inputs, targets).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    loads = [tokens.tolist() for tokens in engine.expert_load.tokens.values()]
    inputs, targets = make_batch(STEPS)
    right = (engine.output(inputs).argmax(-1) == targets)[:, 4:].float().mean()
    return losses, right.item(), loads, sum(one.numel() for one in engine.parameters())


def main(ranks_as: str = "processes") -> None:
    losses, right, loads, held = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    whole = sum(one.numel() for one in build_model().parameters())
    print(f"{right:.0%} of unseen tokens are right; a rank holds {held:,} of {whole:,} parameters")
    for block, load in enumerate(loads):
        print(f"tokens of each expert of block {block}: {', '.join(map(str, load))}")
    inputs, targets = make_batch(0)
    print(plait.verify(build_model, PLAN, inputs, targets, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
