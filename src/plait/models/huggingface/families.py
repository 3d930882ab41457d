"""Conversion of the decoders that a `Family` describes: Llama and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.huggingface.common import (
    Embedding,
    Head,
    Rotary,
    is_scaled,
    rotate_first,
)
from plait.models.huggingface.family import ENTRANCE, Branch, Family
from plait.models.huggingface.unmodified import require_causal, require_unmodified
from plait.models.model_helpers import InitializedLayer, assemble, attention_cost, block, heads_of
from plait.tensor.attention.attention import attend, share_keys

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers in a configuration that plait computes."""


def adapt(model: Any, family: Family) -> nn.Sequential:
    """Return `model`, a decoder of transformers of this family, as a sequence of layers.

    Raises ModelError for a model with altered code, for attention to later positions, and for values of the
    configuration that transformers does not compute either.
    """
    config, body = model.config, model.model
    layers = body.layers[: config.num_hidden_layers]  # as transformers runs them
    attentions = [one.self_attn for one in layers]
    require_unmodified(
        model, [body, body.rotary_emb, *layers, *attentions, *_rebuilt(body, attentions, family)]
    )
    require_causal(config, attentions, family.bidirectional)
    std, context = config.initializer_range, config.max_position_embeddings
    rotaries = Rotary.by_layer_type(body.rotary_emb)
    windows = _windows(config, family, len(layers))
    blocks = [
        block(
            Attention(one, family, _rotary(config, rotaries, index), windows[index], std),
            MLP(one, family, std),
        )
        for index, one in enumerate(layers)
    ]
    embedding = Embedding("embed_tokens", body.embed_tokens, context, std)
    cap = None if family.logit_cap is None else getattr(config, family.logit_cap)
    head = Head("norm", body.norm, model.lm_head, std, cap=cap, norm_start=family.norm_start)
    return assemble(embedding, blocks, head, context=context, rules=family.rules())


def _rebuilt(body: Any, attentions: list[Any], family: Family) -> Iterator[nn.Module]:
    """Yield the modules of which the layers hold others with the same weights."""
    if is_scaled(body.embed_tokens):
        yield body.embed_tokens
    if family.head_norms == "joint":
        yield from (norm for attn in attentions for norm in (attn.q_norm, attn.k_norm))


def _windows(config: Any, family: Family, count: int) -> list[int | None]:
    """Return the attention window of each of `count` layers, as the masks of transformers have them."""
    if family.windows == "none":
        return [None] * count
    window = config.sliding_window
    if family.windows == "all":
        return [window] * count
    types = config.layer_types[:count]
    for index, one in enumerate(types):
        if one not in LAYER_TYPES or (one == LAYER_TYPES[1] and window is None):
            raise ModelError(
                f"layer_types has {one!r} for layer {index}, with sliding_window = {window!r}: give "
                f"{' or '.join(map(repr, LAYER_TYPES))}, the second with a sliding_window."
            )
    return [window if one == LAYER_TYPES[1] else None for one in types]


def _rotary(config: Any, rotaries: dict[str | None, Rotary], index: int) -> Rotary:
    """Return the rotary embedding of a layer: that of its type where they differ by type."""
    return rotaries[None if None in rotaries else config.layer_types[index]]


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: the residual branch of causal attention."""

    def __init__(self, block: Any, family: Family, rotary: Rotary, window: int | None, std: float) -> None:
        super().__init__(std, norm_start=family.norm_start)
        self.branch = add_branch(self, block, family.attention)
        attn = block.self_attn
        self.self_attn: Any = with_plain_norms(attn) if family.head_norms == "joint" else attn
        self.joined, self.head_norms = family.query_key_value, family.head_norms
        self.rotary, self.window = rotary, window
        self.context: int = attn.config.max_position_embeddings
        self.rotates = bool(getattr(attn, "use_rope", True))
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(attn.attention_dropout)
        self.attention_dropout.train(attn.training)
        self.cap: float | None = getattr(attn, family.score_cap) if family.score_cap else None
        if self.rotates and not family.rotates_part:
            rotary.require_all_features(attn.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank's linears hold some heads."""
        return residual(self, x, self.branch, self._attention)

    def _attention(self, normed: Tensor) -> Tensor:
        attn = self.self_attn
        count = attn.o_proj.weight.shape[1] // attn.head_dim  # of query heads on this rank
        project_query, key, value = self._projections(normed, count)
        key, value = self._prepared(key, "k_norm", normed), heads_of(value, attn.head_dim)
        keys = share_keys(key, value, window=self.window, query_heads=count)
        query = self._prepared(project_query(), "q_norm", normed)  # while keys and values are sent
        mixed = attend(query, keys, scale=attn.scaling, softcap=self.cap, dropout=self.attention_dropout)
        output: Tensor = attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _projections(self, normed: Tensor, count: int) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        """Return a function that returns queries, and keys and values: each `[batch, length, heads · size]`.

        `count`: of the query heads.
        """
        attn = self.self_attn
        if self.joined is None:
            return lambda: attn.q_proj(normed), attn.k_proj(normed), attn.v_proj(normed)
        every: Tensor = attn.get_submodule(self.joined)(normed)
        width = count * attn.head_dim
        query, key, value = torch.split(every, [width, *[(every.shape[-1] - width) // 2] * 2], -1)
        return lambda: query, key, value

    def _prepared(self, projected: Tensor, norm: str, like: Tensor) -> Tensor:
        """Return queries or keys by head, normalized and rotated: `[batch, heads, length, size]`."""
        if self.head_norms == "joint":
            projected = self.self_attn.get_submodule(norm)(projected)
        heads = heads_of(projected, self.self_attn.head_dim)
        if self.head_norms == "each":
            heads = self.self_attn.get_submodule(norm)(heads)
        return rotate_first(heads, *self.rotary(like)) if self.rotates else heads

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        seen = min(self.context, self.window or self.context)
        width = self.self_attn.config.num_attention_heads * self.self_attn.head_dim
        return attention_cost(self, seen, width)


class MLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: the residual branch of the MLP."""

    def __init__(self, block: Any, family: Family, std: float) -> None:
        super().__init__(std, norm_start=family.norm_start)
        self.branch = add_branch(self, block, family.mlp)
        self.mlp = block.mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output. With `tp` above 1, each rank's linears hold some features."""
        return residual(self, x, self.branch, self.mlp)


def with_plain_norms(attn: Any) -> nn.Module:
    """Return the modules of an attention, `q_norm` and `k_norm` as norms of torch with the same weights.

    The rule `norm` takes these. In float64 they compute in float64, where transformers takes float32.
    """
    result: Any = nn.Module()
    for name, module in attn.named_children():
        result.add_module(name, _plain_norm(module) if name in ("q_norm", "k_norm") else module)
    result.config, result.head_dim, result.scaling = attn.config, attn.head_dim, attn.scaling
    return result.train(attn.training)  # type: ignore[no-any-return]


def _plain_norm(norm: Any) -> nn.RMSNorm:
    plain = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
    plain.weight = norm.weight
    return plain


def add_branch(layer: nn.Module, block: Any, branch: Branch) -> tuple[str, ...]:
    """Add to `layer` the modules of a block around attention or MLP; return their names, the first in front.

    Where no norm is in front, an identity is, at which the branch enters its region.
    """
    found = [name for name in (branch.before, branch.after, branch.dropout) if name is not None]
    for name in found:
        layer.add_module(name, getattr(block, name))
    if branch.before is not None:
        return tuple(found)
    layer.add_module(ENTRANCE, nn.Identity())
    return (ENTRANCE, *found)


def residual(
    layer: nn.Module, x: Tensor, names: tuple[str, ...], branch: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `x` plus the output of a branch (attention or MLP), with its norms and dropout applied."""
    before, *behind = names
    output = branch(layer.get_submodule(before)(x))
    for name in behind:
        output = layer.get_submodule(name)(output)
    return x + output
