"""Packed sequences: a model for micro-batches of different lengths, and the single device that runs them.

Between layers flow hidden, positions (whole numbers) and which tokens may see each other (a mask); the last
two are passed on by every layer and looked at by some.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, nn

from parity.case import SEED, Batch
from parity.cases import with_values
from parity.layers import HIDDEN, VOCAB
from plait.rules import Rules, column, row
from plait.tensor.losses import CrossEntropy

LOSS = CrossEntropy()
RULES: Rules = {"*.up": column, "*.down": row}
Packed = tuple[Tensor, Tensor, Tensor]
"""Hidden `[1, length, HIDDEN]`, positions `[1, length]`, mask `[length, length]`."""
Lengths = Sequence[Sequence[int]]
"""Per micro-batch, the lengths of the documents that are packed into it."""


class Look(nn.Module):
    """From tokens, positions, a mask and how much each token weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Packed:
        tokens, positions, mask, weights = batch
        return self.token(tokens) * weights.unsqueeze(-1), positions, mask


class Attend(nn.Module):
    """Attention within each document, with a table for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.position = nn.Embedding(16, HIDDEN)
        self.query, self.key = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, packed: Packed) -> Packed:
        hidden, positions, mask = packed
        given = self.norm(hidden) + self.position(positions)
        scores = self.query(given) @ self.key(given).transpose(1, 2)
        seen = scores.masked_fill(~mask, -1e4).softmax(-1)
        return hidden + seen @ given, positions, mask


class Widen(nn.Module):
    """Two linears, which can be cut over tp; whole numbers and the mask go by untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, packed: Packed) -> Packed:
        hidden, positions, mask = packed
        return hidden + self.down(torch.tanh(self.up(hidden))), positions, mask


class Judge(nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, VOCAB)

    def forward(self, packed: Packed) -> Tensor:
        logits: Tensor = self.output(packed[0])
        return logits


def _build() -> nn.Module:
    inner = [layer for _ in range(4) for layer in (Attend(), Widen())]
    return nn.Sequential(Look(), *inner, Judge())


build = with_values(_build)


def microbatches(lengths: Lengths, seed: int = SEED) -> list[Batch]:
    """Inputs and targets of each micro-batch; the targets of some tokens do not count."""
    generator = torch.Generator().manual_seed(seed)
    return [_microbatch(documents, generator) for documents in lengths]


def _microbatch(documents: Sequence[int], generator: torch.Generator) -> Batch:
    length = sum(documents)
    tokens = torch.randint(VOCAB, (1, length), generator=generator)
    positions = torch.cat([torch.arange(size) for size in documents]).unsqueeze(0)
    owner = torch.cat([torch.full((size,), number) for size, number in zip(documents, count(), strict=False)])
    mask = (owner[:, None] == owner) & torch.ones(length, length, dtype=torch.bool).tril()
    weights = torch.rand(1, length, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (1, length), generator=generator)
    return (tokens, positions, mask, weights), targets.masked_fill(tokens % 4 == 0, -100)


class Single:
    """The model in plain PyTorch; runs micro-batches one after another."""

    def __init__(self) -> None:
        self.model = build().double()

    def step(self, batch: Sequence[Batch]) -> tuple[float, dict[str, Tensor], list[Tensor]]:
        """The mean loss over all micro-batches; the gradients by name; those of each one's weights."""
        self.model.zero_grad()
        counted = sum(LOSS.weight(targets) for _, targets in batch)
        loss, seen = 0.0, []
        for (tokens, positions, mask, weights), targets in batch:
            leaf = weights.clone().requires_grad_()
            total = LOSS.total(self.model((tokens, positions, mask, leaf)), targets) / counted
            total.backward()  # type: ignore[no-untyped-call]
            loss += total.item()
            assert leaf.grad is not None
            seen.append(leaf.grad)
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return loss, {name: one.clone() for name, one in gradients.items() if one is not None}, seen
