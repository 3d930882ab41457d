"""Conversion of `LlamaForCausalLM`, `Qwen2ForCausalLM` and `MistralForCausalLM` of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plait.context_attention import attend, share_keys
from plait.models.huggingface.common import (
    MLP,
    Embedding,
    Head,
    Rotary,
    attention_cost,
    rotate_first,
)
from plait.models.model_helpers import InitializedLayer, assemble, block, head_count, heads_of
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
    """Return `model` as a sequence of layers. Raises ModelError for unsupported rotary embeddings.

    Unsupported are those whose angles depend on the length of the sequence.
    """
    config, body = model.config, model.model
    std, context = config.initializer_range, config.max_position_embeddings
    rotary = Rotary(body.rotary_emb)
    blocks = [
        block(
            Attention(one.input_layernorm, one.self_attn, rotary, std),
            MLP("post_attention_layernorm", one.post_attention_layernorm, one.mlp, std),
        )
        for one in body.layers
    ]
    embedding = Embedding("embed_tokens", body.embed_tokens, context, std)
    head = Head("norm", body.norm, model.lm_head, std)
    return assemble(embedding, blocks, head, context=context, rules=RULES)


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + causal attention of norm(x), with rotary positions."""

    def __init__(self, input_layernorm: nn.Module, self_attn: Any, rotary: Rotary, std: float) -> None:
        super().__init__(std)
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.rotary = rotary
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(self_attn.attention_dropout)
        self.attention_dropout.train(self_attn.training)
        # The attention window is an attribute of the module in Qwen2, of the configuration in Mistral.
        of_config = getattr(self_attn.config, "sliding_window", None)
        self.window: int | None = getattr(self_attn, "sliding_window", of_config)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank's linears hold some heads."""
        attn, normed = self.self_attn, self.input_layernorm(x)
        angles, size = self.rotary(normed), attn.head_dim
        key, value = (heads_of(project(normed), size) for project in (attn.k_proj, attn.v_proj))
        keys = share_keys(
            rotate_first(key, *angles), value, window=self.window, query_heads=head_count(attn.q_proj, size)
        )
        query = rotate_first(heads_of(attn.q_proj(normed), size), *angles)
        mixed = attend(query, keys, scale=attn.scaling, dropout=self.attention_dropout)
        result: Tensor = x + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return result

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        config = self.self_attn.config
        context = min(config.max_position_embeddings, self.window or config.max_position_embeddings)
        return attention_cost(self, context, config.num_attention_heads * self.self_attn.head_dim)
