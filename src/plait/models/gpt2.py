"""GPT-2 (Radford et al. 2019) as a plain sequence of layers, for a single device.

    embedding → blocks.0.attention → blocks.0.mlp → … → head

Attention and MLP are separate layers, for finer cuts between stages and smaller gathers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.models.model_helpers import (
    INITIAL_STD,
    Head,
    InitializedLayer,
    assemble,
    attention_cost,
    block,
    require_length,
)
from plait.plan.decoder_sizes import Decoder
from plait.plan.rules import Rules, column, entrance, row, sequence, vocabulary
from plait.tensor.attention.attention import attend, heads_of, share_keys
from plait.tensor.running_sequence import positions

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
    given = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "context": context}
    return gpt2_of(Decoder.of_family("gpt2", **given, tied=tied))


def gpt2_of(sizes: Decoder) -> nn.Sequential:
    """Return GPT-2 on the meta device, as `gpt2` does, of the sizes in a `Decoder`."""
    hidden, vocab, context = sizes.hidden, sizes.vocab, sizes.context
    # A smaller start for residual projections, so that the sum over all layers keeps its size
    # (Radford et al. 2019, section 2.3).
    std = INITIAL_STD / math.sqrt(2 * sizes.layers)
    with torch.device("meta"):
        embedding = Embedding(vocab, hidden, context)
        blocks = [
            block(Attention(hidden, sizes.heads, context, std), MLP(hidden, std)) for _ in range(sizes.layers)
        ]
        head = Head(nn.LayerNorm(hidden), hidden, vocab)
    if sizes.tied:
        head.output.weight = embedding.token.weight
    return assemble(embedding, blocks, head, context=context, rules=RULES)


class Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`: token embedding plus position embedding."""

    def __init__(self, vocab: int, hidden: int, context: int) -> None:
        super().__init__(INITIAL_STD, {"position": INITIAL_STD / 2})
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(context, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens, self.position.num_embeddings)
        embedded: Tensor = self.token(tokens) + self.position(positions(tokens))
        return embedded


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + multi-head causal attention of norm(x)."""

    def __init__(self, hidden: int, heads: int, context: int, std: float) -> None:
        super().__init__(INITIAL_STD, {"output": std})
        self.heads = heads  # read by the rules
        self.head_size = hidden // heads
        self.context = context
        self.norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank's linears hold some heads."""
        normed = self.norm(x)
        key, value = (heads_of(linear(normed), self.head_size) for linear in (self.key, self.value))
        keys = share_keys(key, value, query_heads=key.shape[1])
        mixed = attend(heads_of(self.query(normed), self.head_size), keys)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def cost(self) -> float:
        """Return multiplications per token: four matrices, scores and weighted values over the context."""
        return attention_cost(self, self.context, self.query.in_features)


class MLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: norm(x) through linear, GELU and linear, plus x."""

    def __init__(self, hidden: int, std: float) -> None:
        super().__init__(INITIAL_STD, {"down": std})
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output."""
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return result
