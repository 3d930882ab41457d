"""The layers of `plait.models.huggingface` by definition, from the modules of transformers that they hold.

Rotary frequencies come from the configuration. In float64, too, transformers computes angles in float32, and
so does plait: where plait's are as close to the definition as float32 is, they are taken, else its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.huggingface import common, gpt
from plait.models.huggingface import families as decoder
from plait.models.huggingface.latent_attention import LatentAttention
from plait.models.model_helpers import require_length
from plait.verification.definitions.attention_and_dropout import Definitions, Forward
from plait.verification.definitions.layers import joined_heads, split_heads
from plait.verification.definitions.rotary import Angles, angles_at, rotated, scaled_frequencies

FLOAT32_ANGLE = 2.0**-21
"""Largest error of the cosine of an angle up to 1 that is computed in float32, from float32 frequencies."""


def _angles(
    book: Definitions, rotary: common.Rotary, config: Any, kind: str | None, normed: Tensor
) -> Angles:
    """Return the angles of this micro-batch's positions; `kind`: the type of the layer."""
    taken = Angles(*rotary(normed))
    parameters = getattr(config, "rope_parameters", None)
    if parameters and "rope_theta" not in parameters:
        parameters = parameters.get(kind)  # each type of layer has its own
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        return taken
    size = _rotated_size(rotary, config, parameters)
    scaled = scaled_frequencies(parameters, size, config.max_position_embeddings)
    if scaled is None:
        return taken
    frequencies, factor = scaled[0].to(normed.device), scaled[1]
    positions = book.positions(normed)
    defined = angles_at(positions, frequencies, factor)
    reach = positions.to(torch.float64).unsqueeze(-1) * frequencies + 1
    allowed = FLOAT32_ANGLE * factor * (reach.unsqueeze(1) if positions.dim() == 2 else reach)
    if normed.dtype.itemsize <= 2:
        allowed = allowed + factor * torch.finfo(normed.dtype).eps
    pairs = zip(taken, defined, strict=True)
    if all(a.shape == b.shape and bool(((a.double() - b).abs() <= allowed).all()) for a, b in pairs):
        return taken
    return Angles(*(one.to(normed.dtype) for one in defined))


def _rotated_size(rotary: common.Rotary, config: Any, parameters: Mapping[str, Any]) -> int:
    """Return the number of features of a head that are rotated; with an odd one there is half a pair more."""
    pairs = rotary.bits.shape[-1]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part = int(head * parameters.get("partial_rotary_factor", 1.0))
    return part if (part + 1) // 2 == pairs else 2 * pairs  # a class may ignore the factor


def _embedding(book: Definitions, layer: common.Embedding, tokens: Tensor) -> Tensor:
    require_length(tokens, layer.context)
    embedded: Tensor = layer.get_submodule(layer.name)(tokens)
    if layer.scale is not None:  # transformers holds it as float32, and casts it to the model's dtype
        embedded = embedded * torch.tensor(layer.scale, dtype=torch.float32).to(embedded)
    return embedded if layer.emb_dropout is None else layer.emb_dropout(embedded)


def _head(book: Definitions, layer: common.Head, x: Tensor) -> Tensor:
    logits: Tensor = layer.lm_head(layer.get_submodule(layer.name)(x))
    return logits if layer.cap is None else torch.tanh(logits / layer.cap) * layer.cap


def _gpt2_embedding(book: Definitions, layer: gpt.GPT2Embedding, tokens: Tensor) -> Tensor:
    require_length(tokens, layer.wpe.num_embeddings)
    embedded: Tensor = layer.drop(layer.wte(tokens) + layer.wpe(book.positions(tokens)))
    return embedded


def _gpt2_attention(book: Definitions, layer: gpt.GPT2Attention, x: Tensor) -> Tensor:
    attn = layer.attn
    width = attn.head_dim * attn.num_heads
    parts = attn.c_attn(layer.ln_1(x)).split(width, -1)
    query, key, value = (split_heads(part, attn.head_dim) for part in parts)
    mixed = book.attention(query, key, value, scale=attn.scaling, dropout=attn.attn_dropout)
    result: Tensor = x + attn.resid_dropout(attn.c_proj(joined_heads(mixed)))
    return result


def _neox_block(book: Definitions, layer: gpt.GPTNeoXBlock, x: Tensor) -> Tensor:
    attn = layer.attention
    normed = layer.input_layernorm(x)
    heads = split_heads(attn.query_key_value(normed), 3 * attn.head_size)
    query, key, value = torch.split(heads, attn.head_size, -1)
    angles = _angles(book, layer.rotary, attn.config, None, normed)
    query, key = rotated(query, angles), rotated(key, angles)
    mixed = book.attention(query, key, value, scale=attn.scaling, dropout=layer.attention_dropout)
    after = x + layer.post_attention_dropout(attn.dense(joined_heads(mixed)))
    inner = layer.mlp(layer.post_attention_layernorm(x if layer.parallel else after))
    result: Tensor = after + layer.post_mlp_dropout(inner)
    return result


def _mlp(book: Definitions, layer: common.MLP, x: Tensor) -> Tensor:
    return _branch(layer, x, layer.mlp)


def _branch(layer: Any, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x plus a branch of a block, with the modules before and behind it."""
    before, *behind = (layer.get_submodule(name) for name in layer.branch)
    output = compute(before(x))
    for module in behind:
        output = module(output)
    return x + output


def _mixed(book: Definitions, layer: decoder.Attention, normed: Tensor) -> Tensor:
    """Return the output of a decoder's attention, from its normalized input."""
    attn, size = layer.self_attn, layer.self_attn.head_dim
    kind = attn.layer_type  # that the configuration gives to the layer
    key, value, query = _projected(layer, normed)
    if layer.rotates:
        angles = _angles(book, layer.rotary, attn.config, kind, normed)
        key, query = rotated(key, angles), rotated(query, angles)
    value, window = split_heads(value, size), _window(layer, kind)
    options: Any = {"softcap": layer.cap, "dropout": layer.attention_dropout}
    options["sinks"] = getattr(attn, "sinks", None)
    mixed = book.attention(query, key, value, True, window, scale=attn.scaling, **options)
    output: Tensor = attn.o_proj(joined_heads(mixed))
    return output


def _projected(layer: decoder.Attention, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys by head, values, and queries by head, normalized as the family does."""
    attn, size = layer.self_attn, layer.self_attn.head_dim
    if layer.joined is None:
        key, value, query = (linear(normed) for linear in (attn.k_proj, attn.v_proj, attn.q_proj))
    else:
        config = attn.config
        widths = [size * config.num_attention_heads, *[size * config.num_key_value_heads] * 2]
        query, key, value = attn.get_submodule(layer.joined)(normed).split(widths, -1)
    if layer.head_norms == "joint":
        key, query = attn.k_norm(key), attn.q_norm(query)
    key, query = split_heads(key, size), split_heads(query, size)
    if layer.head_norms == "each":
        key, query = attn.k_norm(key), attn.q_norm(query)
    return key, value, query


def _window(layer: decoder.Attention, kind: str | None) -> int | None:
    """Return the attention window of a layer, from its module; none for full attention."""
    if kind == "full_attention":
        return None
    named = getattr(layer.self_attn, "sliding_window", None)
    return layer.window if named is None else int(named)


def _latent(book: Definitions, layer: LatentAttention, normed: Tensor) -> Tensor:
    """Return the output of latent attention, from its normalized input."""
    attn, config = layer.self_attn, layer.self_attn.config
    plain, turned, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    angles = _angles(book, layer.rotary, config, None, normed)

    def at_positions(x: Tensor) -> Tensor:
        if config.rope_interleave:
            x = x.reshape(*x.shape[:-1], turned // 2, 2).mT.flatten(-2)
        return rotated(x, angles)

    if config.q_lora_rank is None:
        queries = attn.q_proj(normed)
    else:
        queries = attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(normed)))
    query = split_heads(queries, plain + turned)
    query = torch.cat([query[..., :plain], at_positions(query[..., plain:])], -1)
    latents = attn.kv_a_proj_with_mqa(normed)
    both = split_heads(attn.kv_b_proj(attn.kv_a_layernorm(latents[..., :rank])), plain + config.v_head_dim)
    shared = at_positions(latents[:, None, :, rank:])
    key = torch.cat([both[..., :plain], shared.expand(-1, both.shape[1], -1, -1)], -1)
    dropout = layer.attention_dropout
    mixed = book.attention(query, key, both[..., plain:], True, scale=attn.scaling, dropout=dropout)
    output: Tensor = attn.o_proj(joined_heads(mixed))
    return output


FORWARDS: dict[type[nn.Module], Forward] = {
    common.Embedding: _embedding,
    common.MLP: _mlp,
    common.Head: _head,
    gpt.GPT2Embedding: _gpt2_embedding,
    gpt.GPT2Attention: _gpt2_attention,
    gpt.GPTNeoXBlock: _neox_block,
    decoder.Attention: lambda book, layer, x: _branch(layer, x, partial(_mixed, book, layer)),
    LatentAttention: lambda book, layer, x: _branch(layer, x, partial(_latent, book, layer)),
}
"""By the type of a module, its forward by definition."""
