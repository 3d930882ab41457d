"""Models and batches for context parallelism: windows, attention to both sides, packed documents."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import plait
from parity.case import Batch, Case
from parity.cases import GPT2_VOCAB, with_values

HEADS, WIDTH = 6, 4
HIDDEN = HEADS * WIDTH


class Start(nn.Module):
    """Tokens, with an embedding of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(GPT2_VOCAB, HIDDEN), nn.Embedding(16, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens) + self.position(plait.positions(tokens))
        return embedded


class Attention(nn.Module):
    """Attention in a residual connection, by `plait.attention`; `explicit`: by a softmax over a mask."""

    def __init__(self, causal: bool, window: int | None, kv_heads: int) -> None:
        super().__init__()
        self.causal, self.window, self.explicit = causal, window, False
        self.norm, self.query = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = (nn.Linear(HIDDEN, kv_heads * WIDTH) for _ in range(2))
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.explicit:
            mixed = explicit_attention(query, key, value, self.causal, self.window)
        else:
            mixed = plait.attention(query, key, value, self.causal, self.window)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> Tensor:
    """Softmax of all scores, with a mask of all pairs."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) & causal | (distance.abs() >= (window or length))
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


class MLP(nn.Module):
    """A layer that works on each position by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


@cache
def mixing(length: int, causal: bool = True, window: int | None = None, kv_heads: int = HEADS) -> Case:
    """A user's model, on tokens of some length."""

    def build() -> nn.Module:
        layers = [layer for _ in range(2) for layer in (Attention(causal, window, kv_heads), MLP())]
        return nn.Sequential(Start(), *layers, nn.Linear(HIDDEN, GPT2_VOCAB))

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(GPT2_VOCAB, (rows, length), generator=generator)
        return tokens, tokens.roll(1, 1)

    return Case(
        f"mixing-{length}-{causal}-{window}-{kv_heads}", with_values(build), draw, reference=explicitly
    )


def explicitly(model: nn.Module, inputs: Any) -> Any:
    """The output of the model whose attention is explicit."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.explicit = True
    return model(inputs)


@cache
def packed(case: Case, length: int) -> Case:
    """The case on sequences that are packed from documents of random lengths, each with other cuts."""

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(GPT2_VOCAB, (rows, length + 1), generator=generator)
        begins = torch.rand(rows, length, generator=generator) < 0.3
        inputs = {"tokens": tokens[:, :-1], "document_ids": begins.cumsum(1)}
        targets = tokens[:, 1:].clone()
        targets[torch.rand(rows, length, generator=generator) < 0.2] = -100
        targets[0, 0] = 1
        return inputs, targets

    def each_alone(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack(
            [
                torch.cat([case.reference(model, part[None])[0] for part in documents(tokens, ids)])
                for tokens, ids in zip(inputs["tokens"], inputs["document_ids"], strict=True)
            ]
        )

    return replace(case, name=f"packed-{case.name}", draw=draw, reference=each_alone)


def documents(tokens: Tensor, ids: Tensor) -> list[Tensor]:
    """The documents of one row."""
    begins = [0, *(n for n in range(1, len(ids)) if ids[n] != ids[n - 1]), len(ids)]
    return [tokens[first:stop] for first, stop in pairwise(begins)]
