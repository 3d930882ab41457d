"""Conversion of `GPTNeoXForCausalLM` of transformers: attention and MLP are one layer with a shared input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plait.models.huggingface.common import (
    Embedding,
    Head,
    Rotary,
    rotate_first,
)
from plait.models.huggingface.unmodified import require_causal, require_unmodified
from plait.models.model_helpers import InitializedLayer, assemble, attention_cost, heads_of
from plait.plan.rules import Rules, column, entrance, piece, row, sequence, vocabulary
from plait.tensor.attention.attention import attend, share_keys

RULES: Rules = {
    "embedding.embed_in": vocabulary,
    "blocks.*": sequence,
    "blocks.*.input_layernorm": entrance,
    "blocks.*.attention.query_key_value": column.by("config.num_attention_heads"),
    "blocks.*.attention_dropout": piece.along(1),
    "blocks.*.attention.dense": row.by("config.num_attention_heads"),
    "blocks.*.post_attention_layernorm": entrance,
    "blocks.*.mlp.dense_h_to_4h": column,
    "blocks.*.mlp.dense_4h_to_h": row,
    "head": sequence,
    "head.final_layer_norm": entrance,
    "head.lm_head": vocabulary,
}


def adapt(model: Any) -> nn.Sequential:
    """Return `model` as a sequence of layers. Raises ModelError for unsupported rotary embeddings.

    Unsupported are those whose angles depend on the length of the sequence.
    """
    config, body = model.config, model.gpt_neox
    attentions = [one.attention for one in body.layers]
    require_unmodified(model, [body, body.rotary_emb, *body.layers, *attentions])
    require_causal(config, attentions)
    std, context = config.initializer_range, config.max_position_embeddings
    embedding = Embedding("embed_in", body.embed_in, context, std, body.emb_dropout)
    rotary = Rotary(body.rotary_emb)
    blocks = [Block(block, rotary, std) for block in body.layers]
    head = Head("final_layer_norm", body.final_layer_norm, model.lm_head, std)
    return assemble(embedding, blocks, head, context=context, rules=RULES)


class Block(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + attention + MLP, in parallel or one after the other."""

    def __init__(self, block: Any, rotary: Rotary, std: float) -> None:
        super().__init__(std)
        self.input_layernorm, self.attention = block.input_layernorm, block.attention
        self.post_attention_layernorm, self.mlp = block.post_attention_layernorm, block.mlp
        self.post_attention_dropout, self.post_mlp_dropout = (
            block.post_attention_dropout,
            block.post_mlp_dropout,
        )
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
        result: Tensor = after_attention + self.post_mlp_dropout(
            self.mlp(self.post_attention_layernorm(mlp_input))
        )
        return result

    def _attention(self, normed: Tensor) -> Tensor:
        # Query, key and value of a head are adjacent.
        heads = heads_of(self.attention.query_key_value(normed), 3 * self.attention.head_size)
        query, key, value = heads.chunk(3, dim=-1)
        angles = self.rotary(normed)
        keys = share_keys(rotate_first(key, *angles), value, query_heads=query.shape[1])
        mixed = attend(
            rotate_first(query, *angles), keys, scale=self.attention.scaling, dropout=self.attention_dropout
        )
        output: Tensor = self.attention.dense(mixed.transpose(1, 2).flatten(2))
        return output

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        config = self.attention.config
        return attention_cost(self, self.context, config.hidden_size)
