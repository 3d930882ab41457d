"""Conversion of `GPT2LMHeadModel` of transformers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.huggingface.common import MLP, Head
from plait.models.huggingface.unmodified import require_causal, require_unmodified
from plait.models.model_helpers import (
    InitializedLayer,
    assemble,
    attention_cost,
    block,
    heads_of,
    require_length,
)
from plait.plan.rules import Rules, column, entrance, piece, row, sequence, vocabulary
from plait.tensor.attention.attention import attend, share_keys
from plait.tensor.running_sequence import positions

RULES: Rules = {
    "embedding.wte": vocabulary,
    "blocks.*.attention": sequence,
    "blocks.*.attention.ln_1": entrance,
    "blocks.*.attention.attn.c_attn": column.by("num_heads").joined(3),
    "blocks.*.attention.attn.attn_dropout": piece.along(1),
    "blocks.*.attention.attn.c_proj": row.by("num_heads"),
    "blocks.*.mlp": sequence,
    "blocks.*.mlp.ln_2": entrance,
    "blocks.*.mlp.mlp.c_fc": column,
    "blocks.*.mlp.mlp.c_proj": row,
    "head": sequence,
    "head.ln_f": entrance,
    "head.lm_head": vocabulary,
}


def adapt(model: Any) -> nn.Sequential:
    """Return a `GPT2LMHeadModel` as a sequence of layers. Raises ModelError for cross-attention."""
    config, body = model.config, model.transformer
    if config.add_cross_attention:
        raise ModelError(
            "the model has cross-attention, which needs an encoder: set add_cross_attention off."
        )
    attentions = [one.attn for one in body.h]
    require_unmodified(model, [body, *body.h, *attentions])
    require_causal(config, attentions)
    std, context = config.initializer_range, config.n_positions
    # A smaller start for residual projections (Radford et al. 2019, section 2.3).
    smaller = {"c_proj": std / math.sqrt(2 * config.n_layer)}
    blocks = [
        block(
            Attention(one.ln_1, one.attn, context, std, smaller),
            MLP("ln_2", one.ln_2, one.mlp, std, smaller),
        )
        for one in body.h
    ]
    embedding = Embedding(body.wte, body.wpe, body.drop, std)
    head = Head("ln_f", body.ln_f, model.lm_head, std)
    return assemble(embedding, blocks, head, context=context, rules=RULES)


class Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`: token embedding plus position embedding."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding, drop: nn.Module, std: float) -> None:
        super().__init__(std)
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens, self.wpe.num_embeddings)
        embedded: Tensor = self.drop(self.wte(tokens) + self.wpe(positions(tokens)))
        return embedded


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + causal attention of norm(x)."""

    def __init__(
        self, ln_1: nn.Module, attn: Any, context: int, std: float, smaller: dict[str, float]
    ) -> None:
        super().__init__(std, smaller)
        self.ln_1, self.attn, self.context = ln_1, attn, context

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank's linears hold some heads."""
        attn = self.attn
        projected = attn.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        query, key, value = (heads_of(one, attn.head_dim) for one in projected)
        keys = share_keys(key, value, query_heads=query.shape[1])
        mixed = attend(query, keys, scale=attn.scaling, dropout=attn.attn_dropout)
        result: Tensor = x + attn.resid_dropout(attn.c_proj(mixed.transpose(1, 2).flatten(2)))
        return result

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        return attention_cost(self, self.context, self.attn.embed_dim)
