"""A Llama whose linears multiply in float8 and whose weights are gathered in 8 bits, beside one in bf16.

.venv/bin/python examples/gallery/float8_linears.py

Each sequence counts on by a pattern of its own, which its first tokens show. Sizes of linears are multiples
of 16; the head stays in bf16.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

import plait

PLAN = plait.Plan(dp=2, strategy="full", precision="bf16", linears="float8")
TOKENS, LENGTH, ROWS, STEPS = 32, 16, 32, 60
PATTERNS = ((1, 1), (1, 5), (3, 2), (5, 7), (7, 3), (9, 4))
"""A pattern (a, b) goes from token x to (a x + b) modulo 32."""


def build_model() -> nn.Sequential:
    """Return a Llama of two blocks."""
    return plait.models.llama(layers=2, hidden=64, heads=4, vocab=TOKENS, context=LENGTH, inner=128)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return sequences `[rows, length]` and the next token at each position."""
    generator = torch.Generator().manual_seed(step)
    patterns = torch.tensor(PATTERNS)[torch.randint(len(PATTERNS), (ROWS,), generator=generator)]
    tokens = [torch.randint(TOKENS, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((patterns[:, 0] * tokens[-1] + patterns[:, 1]) % TOKENS)
    sequences = torch.stack(tokens, dim=1)
    return sequences[:, :-1], sequences[:, 1:]


def train(plan: plait.Plan) -> tuple[list[float], int, dict[str, str]]:
    """Return the losses, the bytes of a step's gathers on a rank, and how each linear multiplies."""
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(build_model(), plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = (whole.chunk(plan.dp)[mesh.index("dp")] for whole in make_batch(step))
        losses.append(engine.forward_backward(inputs, targets).item())
        gathered = engine.traffic()["shard"]["all_gather"].bytes
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    return losses, gathered, dict(engine.linear_formats)


def main(ranks_as: str = "processes") -> None:
    losses, gathered, formats = plait.launch(train, PLAN, ranks=PLAN.world, ranks_as=ranks_as)[0]
    plain = replace(PLAN, linears=None)
    losses_in_bf16, gathered_in_bf16, _ = plait.launch(train, plain, ranks=plain.world, ranks_as=ranks_as)[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"in bf16 {losses_in_bf16[0]:.3f} at first, {losses_in_bf16[-1]:.3f} after {STEPS} steps")
    print(f"a step gathers {gathered:,} bytes on a rank, in bf16 {gathered_in_bf16:,}")
    others = ", ".join(f"{path} ({why})" for path, why in formats.items() if why != PLAN.linears)
    print(f"{sum(one == PLAN.linears for one in formats.values())} linears in float8; not {others}")
    inputs, targets = make_batch(0)
    print(plait.verify(build_model, PLAN, inputs, targets, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
