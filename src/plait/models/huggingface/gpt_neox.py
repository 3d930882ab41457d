"""`GPTNeoXForCausalLM` of transformers: a layer a block, because attention and MLP read the same input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plait.models.building import assemble, require_length
from plait.models.huggingface.parts import Layer, Rotary, attend, attention_cost, heads_of, rotate_first
from plait.rules import Rules, column, entrance, piece, row, sequence, vocabulary

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
    """The sequence of `model`. ModelError for rotary embeddings that depend on a sequence's length."""
    config, body = model.config, model.gpt_neox
    spread, context = config.initializer_range, config.max_position_embeddings
    embedding = Embedding(body.embed_in, body.emb_dropout, context, spread)
    blocks = [Block(block, body.rotary_emb, spread) for block in body.layers]
    head = Head(body.final_layer_norm, model.lm_head, spread)
    return assemble(embedding, blocks, head, context=context, rules=RULES)


class Embedding(Layer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`: positions come in with attention."""

    def __init__(self, embed_in: nn.Module, emb_dropout: nn.Module, context: int, spread: float) -> None:
        super().__init__(spread)
        self.embed_in, self.emb_dropout, self.context = embed_in, emb_dropout, context

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up. ModelError when the sequence is longer than the context."""
        require_length(tokens.shape[1], self.context)
        embedded: Tensor = self.emb_dropout(self.embed_in(tokens))
        return embedded


class Block(Layer):
    """`[batch, length, hidden]` → the same: x + attention + MLP, side by side or one after the other."""

    def __init__(self, block: Any, rotary: Any, spread: float) -> None:
        super().__init__(spread)
        self.input_layernorm, self.attention = block.input_layernorm, block.attention
        self.post_attention_layernorm, self.mlp = block.post_attention_layernorm, block.mlp
        self.post_attention_dropout, self.post_mlp_dropout = (
            block.post_attention_dropout,
            block.post_mlp_dropout,
        )
        self.rotary = Rotary(rotary)
        # Theirs is a function inside; ours a module, which can be replaced and is told of by name.
        self.attention_dropout = nn.Dropout(block.attention.attention_dropout)
        self.attention_dropout.train(block.training)
        self.parallel: bool = block.use_parallel_residual

    def forward(self, x: Tensor) -> Tensor:
        """The residual connections are inside. The projections may hold some of the heads only."""
        between = x + self.post_attention_dropout(self._attention(self.input_layernorm(x)))
        read = x if self.parallel else between
        result: Tensor = between + self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(read)))
        return result

    def _attention(self, normed: Tensor) -> Tensor:
        # Of each head, query, key and value stand together.
        heads = heads_of(self.attention.query_key_value(normed), 3 * self.attention.head_size)
        query, key, value = heads.chunk(3, dim=-1)
        angles = self.rotary(query)
        query, key = rotate_first(query, *angles), rotate_first(key, *angles)
        mixed = attend(query, key, value, scale=self.attention.scaling, dropout=self.attention_dropout)
        output: Tensor = self.attention.dense(mixed)
        return output

    def cost(self) -> float:
        """Multiplications a token."""
        config = self.attention.config
        return attention_cost(self, config.max_position_embeddings, config.hidden_size)


class Head(Layer):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(self, final_layer_norm: nn.Module, lm_head: nn.Module, spread: float) -> None:
        super().__init__(spread)
        self.final_layer_norm, self.lm_head = final_layer_norm, lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the softmax belongs to the loss."""
        logits: Tensor = self.lm_head(self.final_layer_norm(x))
        return logits
