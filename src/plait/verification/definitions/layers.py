"""The layers of `plait.models` by definition, from their own linears, norms and embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.models.gpt2 import MLP as GPT2_MLP
from plait.models.gpt2 import Attention as GPT2Attention
from plait.models.gpt2 import Embedding as GPT2Embedding
from plait.models.llama import MLP as LLAMA_MLP
from plait.models.llama import Attention as LlamaAttention
from plait.models.llama import Embedding as LlamaEmbedding
from plait.models.model_helpers import Head, require_length
from plait.tensor.dropout import Dropout
from plait.verification.definitions.attention_and_dropout import Definitions, Forward, dropout
from plait.verification.definitions.rotary import angles_at, base_frequencies, rotated


def split_heads(projected: Tensor, size: int) -> Tensor:
    """Return `[rows, length, heads · size]` as `[rows, heads, length, size]`."""
    rows, length, features = projected.shape
    return projected.view(rows, length, features // size, size).transpose(1, 2)


def joined_heads(mixed: Tensor) -> Tensor:
    """Return `[rows, heads, length, size]` as `[rows, length, heads · size]`."""
    rows, heads, length, size = mixed.shape
    return mixed.transpose(1, 2).reshape(rows, length, heads * size)


def _gpt2_embedding(book: Definitions, layer: GPT2Embedding, tokens: Tensor) -> Tensor:
    require_length(tokens, layer.position.num_embeddings)
    embedded: Tensor = layer.token(tokens) + layer.position(book.positions(tokens))
    return embedded


def _gpt2_attention(book: Definitions, layer: GPT2Attention, x: Tensor) -> Tensor:
    normed = layer.norm(x)
    key, value, query = (
        split_heads(linear(normed), layer.head_size) for linear in (layer.key, layer.value, layer.query)
    )
    result: Tensor = x + layer.output(joined_heads(book.attention(query, key, value)))
    return result


def _gpt2_mlp(book: Definitions, layer: GPT2_MLP, x: Tensor) -> Tensor:
    result: Tensor = x + layer.down(functional.gelu(layer.up(layer.norm(x)), approximate="tanh"))
    return result


def _llama_embedding(book: Definitions, layer: LlamaEmbedding, tokens: Tensor) -> Tensor:
    require_length(tokens, layer.context)
    embedded: Tensor = layer.token(tokens)
    return embedded


def _llama_attention(book: Definitions, layer: LlamaAttention, x: Tensor) -> Tensor:
    normed = layer.norm(x)
    wide = torch.promote_types(normed.dtype, torch.float32)
    frequencies = base_frequencies(layer.rope_base, layer.head_size, wide, x.device)
    angles = angles_at(book.positions(x), frequencies)
    key, value, query = (
        split_heads(linear(normed), layer.head_size) for linear in (layer.key, layer.value, layer.query)
    )
    mixed = book.attention(rotated(query, angles), rotated(key, angles), value)
    result: Tensor = x + layer.output(joined_heads(mixed))
    return result


def _llama_mlp(book: Definitions, layer: LLAMA_MLP, x: Tensor) -> Tensor:
    normed = layer.norm(x)
    result: Tensor = x + layer.down(functional.silu(layer.gate(normed)) * layer.up(normed))
    return result


def _head(book: Definitions, layer: Head, x: Tensor) -> Tensor:
    logits: Tensor = layer.output(layer.norm(x))
    return logits


FORWARDS: dict[type[nn.Module], Forward] = {
    GPT2Embedding: _gpt2_embedding,
    GPT2Attention: _gpt2_attention,
    GPT2_MLP: _gpt2_mlp,
    LlamaEmbedding: _llama_embedding,
    LlamaAttention: _llama_attention,
    LLAMA_MLP: _llama_mlp,
    Head: _head,
    Dropout: dropout,
}
"""By the type of a module, its forward by definition."""
