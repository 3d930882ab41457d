"""Direct preference optimization (DPO) of a Llama with LoRA: of two answers to a prompt one is preferred.

.venv/bin/python examples/gallery/preferences.py

The model itself is the reference: before the first step, while its adapters add nothing, the
log-probabilities of all answers are computed, once. A row holds a pair, as two packed documents. The pairs: a
sequence of numbers that goes on upwards is preferred to one that turns back. A trained model would come from
`from_pretrained`.
"""

import torch
from torch import Tensor, nn

import plait
from plait.tensor import answer_log_probs, preference_batch

PLAN = plait.Plan(tp=2, microbatches=2)
VOCAB, LENGTH, STEPS = 32, 24, 30
LOSS = plait.dpo_loss(beta=0.5)
Pair = tuple[Tensor, Tensor, Tensor]
Batch = tuple[dict[str, Tensor], dict[str, Tensor]]


def build_model() -> nn.Sequential:
    """Return the layers of a small Llama, frozen, with trained adapters at all linears but the head."""
    return plait.lora(plait.models.llama(layers=2, hidden=32, heads=4, vocab=VOCAB, context=LENGTH), rank=8)


def make_pairs(seed: int, count: int) -> list[Pair]:
    """Return (prompt, chosen, rejected), of unequal lengths; a tokenizer would make them of text."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    pairs = []
    for _ in range(count):
        size, answer, first = draw(2, 6), draw(2, 6), draw(0, VOCAB)
        upwards = (first + torch.arange(size + answer)) % VOCAB
        back = (upwards[size - 1] - 1 - torch.arange(answer)) % VOCAB
        pairs.append((upwards[:size], upwards[size:], back))
    return pairs


def train() -> tuple[list[float], float]:
    """Return the losses, and the share of unseen pairs of which the chosen answer is preferred."""
    engine = plait.parallelize(build_model(), PLAN, plait.Mesh(PLAN), loss=LOSS)

    def batch(seed: int, count: int) -> Batch:
        pairs = make_pairs(seed, count)
        inputs, targets = preference_batch(pairs, LENGTH)
        reference = answer_log_probs(engine.output(inputs), targets)
        return preference_batch(
            [(*pair, *of_pair) for pair, of_pair in zip(pairs, reference, strict=True)], LENGTH
        )

    batches = [batch(seed, count=16) for seed in range(6)]  # the reference once, before the first step
    unseen, targets = batch(99, count=64)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*batches[step % len(batches)]).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    margins = LOSS.margins(engine.output(unseen), targets)
    return losses, (margins > 0).double().mean().item()


def main(ranks_as: str = "processes") -> None:
    losses, preferred = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    every = list(build_model().parameters())
    trained = sum(one.numel() for one in every if one.requires_grad)
    print(f"{trained:,} of {sum(one.numel() for one in every):,} parameters are trained")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"of {preferred:.0%} of unseen pairs the chosen answer is preferred")
    inputs, targets = preference_batch(make_pairs(0, count=16), LENGTH)
    print(plait.verify(build_model, PLAN, inputs, targets, loss=LOSS, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
