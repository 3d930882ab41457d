"""Conversion of `GPT2LMHeadModel` and `GPTNeoXForCausalLM` of transformers.

In GPT-NeoX attention and MLP are one layer with a shared input.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.huggingface.common import (
    MLP,
    Branch,
    Embedding,
    Head,
    Rotary,
    attention_parts,
    require_causal,
    require_unmodified,
    rotate_first,
)
from plait.models.model_helpers import InitializedLayer, assemble, attention_cost, block, require_length
from plait.plan.rules import Rules, column, entrance, piece, row, sequence, vocabulary
from plait.tensor.attention.attention import attend, heads_of, share_keys
from plait.tensor.running_sequence import positions

GPT2_RULES: Rules = {
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
NEOX_RULES: Rules = {
    "embedding.embed_in": vocabulary,
    "blocks.*": sequence,
    "blocks.*.input_layernorm": entrance,
    "blocks.*.attention.query_key_value": column.by("config.num_attention_heads").interleave(3),
    "blocks.*.attention_dropout": piece.along(1),
    "blocks.*.attention.dense": row.by("config.num_attention_heads"),
    "blocks.*.post_attention_layernorm": entrance,
    "blocks.*.mlp.dense_h_to_4h": column,
    "blocks.*.mlp.dense_4h_to_h": row,
    "head": sequence,
    "head.final_layer_norm": entrance,
    "head.lm_head": vocabulary,
}


def adapt_gpt2(model: Any) -> nn.Sequential:
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
        block(GPT2Attention(one, context, std, smaller), MLP(one, Branch("ln_2"), std, smaller))
        for one in body.h
    ]
    embedding = GPT2Embedding(body.wte, body.wpe, body.drop, std)
    head = Head("ln_f", body.ln_f, model.lm_head, std)
    return assemble(embedding, blocks, head, context=context, rules=GPT2_RULES)


class GPT2Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`: token embedding plus position embedding."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding, drop: nn.Module, std: float) -> None:
        super().__init__(std)
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens, self.wpe.num_embeddings)
        embedded: Tensor = self.drop(self.wte(tokens) + self.wpe(positions(tokens)))
        return embedded


class GPT2Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + causal attention of norm(x)."""

    def __init__(self, block: Any, context: int, std: float, smaller: dict[str, float]) -> None:
        super().__init__(std, smaller)
        self.ln_1, self.attn, self.context = block.ln_1, attention_parts(block.attn), context

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


def adapt_gpt_neox(model: Any) -> nn.Sequential:
    """Return a `GPTNeoXForCausalLM` as a sequence of layers; ModelError for unsupported rotary embeddings.

    Unsupported are those whose angles depend on the length of the sequence.
    """
    config, body = model.config, model.gpt_neox
    attentions = [one.attention for one in body.layers]
    require_unmodified(model, [body, body.rotary_emb, *body.layers, *attentions])
    require_causal(config, attentions)
    std, context = config.initializer_range, config.max_position_embeddings
    embedding = Embedding("embed_in", body.embed_in, context, std, body.emb_dropout)
    rotary = Rotary(body.rotary_emb)
    blocks = [GPTNeoXBlock(block, rotary, std) for block in body.layers]
    head = Head("final_layer_norm", body.final_layer_norm, model.lm_head, std)
    return assemble(embedding, blocks, head, context=context, rules=NEOX_RULES)


class GPTNeoXBlock(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + attention + MLP, in parallel or one after the other."""

    def __init__(self, block: Any, rotary: Rotary, std: float) -> None:
        super().__init__(std)
        self.input_layernorm, self.attention = block.input_layernorm, attention_parts(block.attention)
        self.post_attention_layernorm, self.mlp = block.post_attention_layernorm, block.mlp
        self.post_attention_dropout = block.post_attention_dropout
        self.post_mlp_dropout = block.post_mlp_dropout
        self.rotary = rotary
        self.context: int = block.attention.config.max_position_embeddings
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(block.attention.attention_dropout)
        self.attention_dropout.train(block.training)
        self.parallel: bool = block.use_parallel_residual

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the outputs of attention and MLP. With `tp` above 1, each rank has some heads."""
        after_attention = x + self.post_attention_dropout(self._attention(self.input_layernorm(x)))
        mlp_input = x if self.parallel else after_attention
        output = self.mlp(self.post_attention_layernorm(mlp_input))
        result: Tensor = after_attention + self.post_mlp_dropout(output)
        return result

    def _attention(self, normed: Tensor) -> Tensor:
        # Query, key and value of a head are adjacent.
        heads = heads_of(self.attention.query_key_value(normed), 3 * self.attention.head_size)
        query, key, value = heads.chunk(3, dim=-1)
        angles = self.rotary(normed)
        keys = share_keys(rotate_first(key, *angles), value, query_heads=query.shape[1])
        query = rotate_first(query, *angles)
        mixed = attend(query, keys, scale=self.attention.scaling, dropout=self.attention_dropout)
        output: Tensor = self.attention.dense(mixed.transpose(1, 2).flatten(2))
        return output

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        config = self.attention.config
        return attention_cost(self, self.context, config.hidden_size)
