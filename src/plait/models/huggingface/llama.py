"""Conversion of `LlamaForCausalLM`, `Qwen2ForCausalLM` and `MistralForCausalLM` of transformers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from plait.models.huggingface.common import (
    MLP,
    ConvertedLayer,
    Embedding,
    Head,
    Rotary,
    attend,
    attention_cost,
    heads_of,
    rotate_first,
)
from plait.models.model_helpers import assemble
from plait.rules import Rules, column, entrance, piece, row, sequence, vocabulary

RULES: Rules = {
    "embedding.embed_tokens": vocabulary,
    "blocks.*.attention": sequence,
    "blocks.*.attention.input_layernorm": entrance,
    "blocks.*.attention.self_attn.q_proj": column.by("config.num_attention_heads"),
    "blocks.*.attention.self_attn.k_proj": column.by("config.num_key_value_heads", repeated=True),
    "blocks.*.attention.self_attn.v_proj": column.by("config.num_key_value_heads", repeated=True),
    "blocks.*.attention.attention_dropout": piece.along(1),
    "blocks.*.attention.self_attn.o_proj": row.by("config.num_attention_heads"),
    "blocks.*.mlp": sequence,
    "blocks.*.mlp.post_attention_layernorm": entrance,
    "blocks.*.mlp.mlp.gate_proj": column,
    "blocks.*.mlp.mlp.up_proj": column,
    "blocks.*.mlp.mlp.down_proj": row,
    "head": sequence,
    "head.norm": entrance,
    "head.lm_head": vocabulary,
}


def adapt(model: Any) -> nn.Sequential:
    """Return `model` as a sequence. Raises ModelError for rotary embeddings that depend on the length."""
    config, body = model.config, model.model
    std, context = config.initializer_range, config.max_position_embeddings
    blocks = [
        nn.Sequential(
            OrderedDict(
                attention=Attention(block.input_layernorm, block.self_attn, body.rotary_emb, std),
                mlp=MLP("post_attention_layernorm", block.post_attention_layernorm, block.mlp, std),
            )
        )
        for block in body.layers
    ]
    embedding = Embedding("embed_tokens", body.embed_tokens, context, std)
    return assemble(
        embedding, blocks, Head("norm", body.norm, model.lm_head, std), context=context, rules=RULES
    )


class Attention(ConvertedLayer):
    """`[batch, length, hidden]` → the same: x + causal attention of its norm, with rotary positions."""

    def __init__(self, input_layernorm: nn.Module, self_attn: Any, rotary: Any, std: float) -> None:
        super().__init__(std)
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.rotary = Rotary(rotary)
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(self_attn.attention_dropout)
        self.attention_dropout.train(self_attn.training)
        self.window: int | None = _window(self_attn)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the residual connection. The projections may have only some heads."""
        attn, normed = self.self_attn, self.input_layernorm(x)
        query, key, value = (
            heads_of(project(normed), attn.head_dim) for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        angles = self.rotary(query)
        mixed = attend(
            rotate_first(query, *angles),
            rotate_first(key, *angles),
            value,
            scale=attn.scaling,
            dropout=self.attention_dropout,
            window=self.window,
        )
        result: Tensor = x + attn.o_proj(mixed)
        return result

    def cost(self) -> float:
        """Return multiplications per token."""
        config = self.self_attn.config
        context = min(config.max_position_embeddings, self.window or config.max_position_embeddings)
        return attention_cost(self, context, config.num_attention_heads * self.self_attn.head_dim)


def _window(self_attn: Any) -> int | None:
    """Return the attention window: an attribute of the module in Qwen2, of the configuration in Mistral."""
    if hasattr(self_attn, "sliding_window"):
        found: int | None = self_attn.sliding_window
        return found
    return getattr(self_attn.config, "sliding_window", None)
