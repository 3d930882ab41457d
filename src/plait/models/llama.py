"""Llama (Touvron et al. 2023) as a plain sequence of layers, for a single device.

    embedding → blocks.0.attention → blocks.0.mlp → … → head

Differs from GPT-2 by RMS norm (Zhang & Sennrich 2019), rotary position embedding (Su et al.
2021), query heads that share key and value heads (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases.
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
    head_count,
    require_length,
)
from plait.models.result_cache import ResultCache
from plait.models.rotary import rotary_angles, rotate
from plait.plan.decoder_sizes import ROPE_BASE, TOP_K, Decoder
from plait.plan.rules import Rules, column, entrance, row, sequence, vocabulary
from plait.tensor.attention.attention import attend, heads_of, share_keys
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.routing import Routing

EPSILON = 1e-5
"""Epsilon of the norms, as in Llama 2."""
CORRECTED = Routing(corrected=True)
"""Softmax, then the `top_k` largest, whose weights add up to 1; with a correction of the choice."""
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
SHARED_RULES: Rules = {
    "blocks.*.mlp.mixture.shared.gate_up": column.joined(2),
    "blocks.*.mlp.mixture.shared.down": row,
}
"""Those of shared experts; the norm before a mixture is also the input of routers, which are whole."""


def llama(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    inner: int | None = None,
    experts: int | None = None,
    top_k: int = TOP_K,
    shared: int = 0,
    vocab: int = 32000,
    context: int = 4096,
    tied: bool = False,
    rope_base: float = ROPE_BASE,
) -> nn.Sequential:
    """Return Llama on the meta device: tokens `[batch, length ≤ context]` → logits `[batch, length, vocab]`.

    The defaults are those of Llama 2 7B. `layers` counts transformer blocks, each two layers of the sequence.
    `kv_heads`: key and value heads, each shared by `heads / kv_heads` query heads in a row; None: as many as
    heads. `inner`: width inside the MLP; None: 2/3 · 4 · hidden, rounded up to a multiple of 256. `experts`:
    makes the model sparse, with so many MLPs a block, of which each token passes through `top_k`, and through
    one of width `shared`; see `MixtureOfExperts`. `tied`: the head's weight is the token embedding's.
    `rope_base`: the base of the rotary frequencies. ModelError where the sizes do not fit each other.
    """
    given = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "context": context}
    others = {"kv_heads": kv_heads, "inner": inner, "tied": tied, "rope_base": rope_base}
    sparse = {"experts": experts, "top_k": top_k, "shared": shared}
    return llama_of(Decoder.of_family("llama", **given, **others, **sparse))


def llama_of(sizes: Decoder) -> nn.Sequential:
    """Return Llama on the meta device, as `llama` does, of the sizes in a `Decoder`."""
    hidden, vocab, context = sizes.hidden, sizes.vocab, sizes.context
    # A smaller start for residual projections, as in GPT-2 (Radford et al. 2019, section 2.3).
    std = INITIAL_STD / math.sqrt(2 * sizes.layers)
    angles = ResultCache()
    with torch.device("meta"):
        embedding = Embedding(vocab, hidden, context)
        of_attention = hidden, sizes.heads, sizes.key_heads, context, sizes.rope_base, std, angles
        blocks = [block(Attention(*of_attention), _mlp(sizes, std)) for _ in range(sizes.layers)]
        head = Head(nn.RMSNorm(hidden, eps=EPSILON), hidden, vocab)
    if sizes.tied:
        head.output.weight = embedding.token.weight
    return assemble(embedding, blocks, head, context=context, rules=_rules(sizes))


def _mlp(sizes: Decoder, std: float) -> MLP | SparseMLP:
    """Return the MLP of a block: one, or experts."""
    if sizes.experts is None:
        return MLP(sizes.hidden, sizes.inside, std)
    return SparseMLP(sizes.hidden, sizes.inside, sizes.experts, sizes.top_k, sizes.shared, std)


def _rules(sizes: Decoder) -> Rules:
    """Return the tensor-parallel rules for a model of these sizes, each of which matches a module."""
    if sizes.experts is None:
        return RULES
    dense = ("blocks.*.mlp.norm", "blocks.*.mlp.gate", "blocks.*.mlp.up", "blocks.*.mlp.down")
    others = {path: rule for path, rule in RULES.items() if path not in dense}
    return {**others, **SHARED_RULES} if sizes.shared else others


class Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`, without positions, which attention adds."""

    def __init__(self, vocab: int, hidden: int, context: int) -> None:
        super().__init__(INITIAL_STD)
        self.context = context
        self.token = nn.Embedding(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens, self.context)
        embedded: Tensor = self.token(tokens)
        return embedded


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + causal attention of norm(x), with rotary positions.

    Query head h reads key and value head h // (heads / kv_heads).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        context: int,
        rope_base: float,
        std: float,
        angles: ResultCache | None = None,
    ) -> None:
        """`angles`: the cache of rotary angles that layers of a model share; None: a new cache."""
        super().__init__(INITIAL_STD, {"output": std})
        self.heads, self.kv_heads = heads, kv_heads  # read by the rules
        self.head_size = hidden // heads
        self.context = context
        self.rope_base = rope_base
        self.angles = ResultCache() if angles is None else angles
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank's linears hold some heads."""
        normed = self.norm(x)
        angles = rotary_angles(normed.shape[1], self.head_size, self.rope_base, normed, self.angles)
        key, value = (heads_of(linear(normed), self.head_size) for linear in (self.key, self.value))
        keys = share_keys(rotate(key, *angles), value, query_heads=head_count(self.query, self.head_size))
        mixed = attend(rotate(heads_of(self.query(normed), self.head_size), *angles), keys)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def cost(self) -> float:
        """Return multiplications per token: four matrices, scores and weighted values over the context."""
        return attention_cost(self, self.context, self.query.in_features)


class MLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + down(silu(gate(y)) · up(y)), y = norm(x) (SwiGLU)."""

    def __init__(self, hidden: int, inner: int, std: float) -> None:
        super().__init__(INITIAL_STD, {"down": std})
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output."""
        normed = self.norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class SparseMLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + mixture(norm(x)), with experts that are gated MLPs."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, shared: int, std: float) -> None:
        super().__init__(INITIAL_STD, {"down": std, "down_proj": std})
        self.norm = nn.RMSNorm(hidden, eps=EPSILON)
        # Corrections are zeros, unless `balance_experts` is told to change them.
        self.mixture = MixtureOfExperts(hidden, inner, experts, top_k, shared, routing=CORRECTED)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the mixture's output."""
        result: Tensor = x + self.mixture(self.norm(x))
        return result
