"""GPT-2 (Radford et al. 2019) as a plain sequence of layers, for a single device.

    embedding → blocks.0.attention → blocks.0.mlp → … → head

Attention and MLP are separate layers, for finer cuts between stages and smaller gathers.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.models.initial import Initial, Normal
from plait.models.model_helpers import (
    INITIAL_STD,
    assemble,
    require_length,
    require_positive,
    require_whole_heads,
)
from plait.rules import Rules, column, entrance, row, sequence, vocabulary

RULES: Rules = {
    "embedding.token": vocabulary,
    "blocks.*.attention": sequence,
    "blocks.*.attention.norm": entrance,
    "blocks.*.attention.query": column.by("heads"),
    "blocks.*.attention.key": column.by("heads"),
    "blocks.*.attention.value": column.by("heads"),
    "blocks.*.attention.output": row.by("heads"),
    "blocks.*.mlp": sequence,
    "blocks.*.mlp.norm": entrance,
    "blocks.*.mlp.up": column,
    "blocks.*.mlp.down": row,
    "head": sequence,
    "head.norm": entrance,
    "head.output": vocabulary,
}
"""The rules of tensor parallelism; other modules, such as the position embedding, are whole on every rank."""


def gpt2(
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    context: int = 1024,
    tied: bool = True,
) -> nn.Sequential:
    """Return GPT-2 on the meta device: tokens `[batch, length ≤ context]` → logits `[batch, length, vocab]`.

    `layers` counts transformer blocks, each two layers of the sequence. `tied`: the head's weight is the
    token embedding's. Raises ModelError when the sizes do not fit each other.
    """
    require_positive(layers=layers, hidden=hidden, heads=heads, vocab=vocab, context=context)
    require_whole_heads(hidden, heads)
    with torch.device("meta"):
        embedding = Embedding(vocab, hidden, context)
        blocks = [block(hidden, heads, layers, context) for _ in range(layers)]
        head = Head(hidden, vocab)
    if tied:
        head.output.weight = embedding.token.weight
    return assemble(embedding, blocks, head, context=context, rules=RULES)


def block(hidden: int, heads: int, layers: int, context: int) -> nn.Sequential:
    """Return one transformer block: an attention layer and an MLP layer."""
    # A smaller start for residual projections, so that the sum over all layers keeps its size
    # (Radford et al. 2019, section 2.3).
    std = INITIAL_STD / math.sqrt(2 * layers)
    attention = Attention(hidden, heads, context, std)
    return nn.Sequential(OrderedDict(attention=attention, mlp=MLP(hidden, std)))


class Embedding(nn.Module):
    """Tokens `[batch, length]` → `[batch, length, hidden]`: token embedding plus position embedding."""

    def __init__(self, vocab: int, hidden: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(context, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings. Raises ModelError for a sequence longer than the context."""
        length = tokens.shape[1]
        require_length(length, self.position.num_embeddings)
        positions = torch.arange(length, device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(positions)
        return embedded

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter."""
        return {"token.weight": Normal(INITIAL_STD), "position.weight": Normal(INITIAL_STD / 2)}


class Attention(nn.Module):
    """`[batch, length, hidden]` → the same: x + causal attention of its layer norm, several heads."""

    def __init__(self, hidden: int, heads: int, context: int, std: float) -> None:
        super().__init__()
        self.heads = heads  # read by the rules
        self.head_size = hidden // heads
        self.context = context
        self.std = std
        self.norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output with the residual connection. The linears may hold only some of the heads."""
        normed = self.norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter."""
        inner = {f"{name}.weight": Normal(INITIAL_STD) for name in ("query", "key", "value")}
        biases = {f"{name}.bias": Normal(0.0) for name in ("query", "key", "value", "output")}
        return {**inner, **biases, "output.weight": Normal(self.std)}

    def cost(self) -> float:
        """Return multiplications per token: four matrices, scores and weighted values over the context."""
        hidden = self.query.in_features
        return 4.0 * hidden * hidden + 2.0 * self.context * hidden


class MLP(nn.Module):
    """`[batch, length, hidden]` → the same: x + two linears with a GELU between, of its layer norm."""

    def __init__(self, hidden: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the residual connection."""
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return result

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter."""
        return {
            "up.weight": Normal(INITIAL_STD),
            "up.bias": Normal(0.0),
            "down.weight": Normal(self.std),
            "down.bias": Normal(0.0),
        }


class Head(nn.Module):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.output(self.norm(x))
        return logits

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter."""
        return {"output.weight": Normal(INITIAL_STD)}
