"""Llama (Touvron et al. 2023) as a plain sequence of layers, for a single device.

    embedding → blocks.0.attention → blocks.0.mlp → … → head

Differs from GPT-2 by RMS norm (Zhang & Sennrich 2019), rotary position embedding (Su et al.
2021), query heads that share key and value heads (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.default_sizes import default_inner
from plait.errors import ModelError
from plait.models.initial import Initial, Normal
from plait.models.model_helpers import (
    INITIAL_STD,
    assemble,
    require_length,
    require_positive,
    require_whole_heads,
)
from plait.models.rotary import rotary_angles, rotate
from plait.rules import Rules, column, entrance, row, sequence, vocabulary

EPSILON = 1e-5
"""Epsilon of the norms, as in Llama 2."""
RULES: Rules = {
    "embedding.token": vocabulary,
    "blocks.*.attention": sequence,
    "blocks.*.attention.norm": entrance,
    "blocks.*.attention.query": column.by("heads"),
    "blocks.*.attention.key": column.by("kv_heads", repeated=True),
    "blocks.*.attention.value": column.by("kv_heads", repeated=True),
    "blocks.*.attention.output": row.by("heads"),
    "blocks.*.mlp": sequence,
    "blocks.*.mlp.norm": entrance,
    "blocks.*.mlp.gate": column,
    "blocks.*.mlp.up": column,
    "blocks.*.mlp.down": row,
    "head": sequence,
    "head.norm": entrance,
    "head.output": vocabulary,
}
"""The rules of tensor parallelism; other modules are whole on every rank."""


def llama(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    inner: int | None = None,
    vocab: int = 32000,
    context: int = 4096,
    tied: bool = False,
    rope_base: float = 10000.0,
) -> nn.Sequential:
    """Return Llama on the meta device: tokens `[batch, length ≤ context]` → logits `[batch, length, vocab]`.

    The defaults are those of Llama 2 7B. `layers` counts transformer blocks, each two layers of the sequence.
    `kv_heads`: key and value heads, each shared by `heads / kv_heads` query heads in a row; None: as many as
    heads. `inner`: width inside the MLP; None: 2/3 · 4 · hidden, rounded up to a multiple of 256. `tied`: the
    head's weight is the token embedding's. `rope_base`: the base of the rotary frequencies. ModelError where
    the sizes do not fit each other.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    inner = default_inner(hidden) if inner is None else inner
    require_positive(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
    require_positive(inner=inner, vocab=vocab, context=context)
    _require_fitting_heads(hidden, heads, kv_heads)
    if not (math.isfinite(rope_base) and rope_base > 0):
        raise ModelError(f"model.rope_base is {rope_base}: give a number above 0, such as 10000.")
    # A smaller start for residual projections, as in GPT-2 (Radford et al. 2019, section 2.3).
    std = INITIAL_STD / math.sqrt(2 * layers)
    with torch.device("meta"):
        embedding = Embedding(vocab, hidden, context)
        blocks = []
        for _ in range(layers):
            attention = Attention(hidden, heads, kv_heads, context, rope_base, std)
            blocks.append(nn.Sequential(OrderedDict(attention=attention, mlp=MLP(hidden, inner, std))))
        head = Head(hidden, vocab)
    if tied:
        head.output.weight = embedding.token.weight
    return assemble(embedding, blocks, head, context=context, rules=RULES)


def _require_fitting_heads(hidden: int, heads: int, kv_heads: int) -> None:
    require_whole_heads(hidden, heads)
    if heads % kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ModelError(
            f"model.heads = {heads} is not divisible by model.kv_heads = {kv_heads}: "
            f"set kv_heads to {' or '.join(divisors)}."
        )
    if hidden // heads % 2:
        raise ModelError(
            f"model.hidden = {hidden} over model.heads = {heads} makes heads of {hidden // heads} features, "
            f"and rotary embedding rotates pairs of them: set hidden to a multiple of {2 * heads}."
        )


class Embedding(nn.Module):
    """Tokens `[batch, length]` → `[batch, length, hidden]`, without positions, which attention adds."""

    def __init__(self, vocab: int, hidden: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens.shape[1], self.context)
        embedded: Tensor = self.token(tokens)
        return embedded

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter."""
        return {"token.weight": Normal(INITIAL_STD)}


class Attention(nn.Module):
    """`[batch, length, hidden]` → the same: x + causal attention of its norm, with rotary positions.

    Query head h reads key and value head h // (heads / kv_heads).
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, context: int, rope_base: float, std: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads  # read by the rules
        self.head_size = hidden // heads
        self.context = context
        self.rope_base = rope_base
        self.std = std
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the residual connection. The linears may hold only some of the heads."""
        normed = self.norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        angles = rotary_angles(query.shape[2], self.head_size, self.rope_base, query)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, *angles),
            rotate(key, *angles),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter but the norm's, which is 1."""
        inner = {f"{name}.weight": Normal(INITIAL_STD) for name in ("query", "key", "value")}
        return {**inner, "output.weight": Normal(self.std)}

    def cost(self) -> float:
        """Return multiplications per token: four matrices, scores and weighted values over the context."""
        hidden = self.query.in_features
        return 2.0 * hidden * (hidden + self.kv_heads * self.head_size) + 2.0 * self.context * hidden


class MLP(nn.Module):
    """`[batch, length, hidden]` → the same: x + down(silu(gate) · up) of its norm (SwiGLU)."""

    def __init__(self, hidden: int, inner: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the residual connection."""
        normed = self.norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter but the norm's, which is 1."""
        return {
            "gate.weight": Normal(INITIAL_STD),
            "up.weight": Normal(INITIAL_STD),
            "down.weight": Normal(self.std),
        }


class Head(nn.Module):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.output(self.norm(x))
        return logits

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter but the norm's, which is 1."""
        return {"output.weight": Normal(INITIAL_STD)}
