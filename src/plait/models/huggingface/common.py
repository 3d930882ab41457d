"""Code shared by the converters: layers of several families, rotary positions, and causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.layers.result_cache import ResultCache
from plait.models.model_helpers import InitializedLayer, require_length
from plait.models.rotary import rotate

STEADY_ROTARY = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the length of the sequence."""


class Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`, without positions, which attention adds."""

    def __init__(
        self, name: str, table: nn.Module, context: int, std: float, emb_dropout: nn.Module | None = None
    ) -> None:
        """`name`: the attribute that holds `table`, as in the model of transformers."""
        super().__init__(std)
        self.name, self.context = name, context
        self.add_module(name, table)
        self.emb_dropout = emb_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens.shape[1], self.context)
        embedded: Tensor = self.get_submodule(self.name)(tokens)
        return embedded if self.emb_dropout is None else self.emb_dropout(embedded)


class MLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + mlp(norm(x))."""

    def __init__(
        self,
        name: str,
        norm: nn.Module,
        mlp: nn.Module,
        std: float,
        exceptions: Mapping[str, float] | None = None,
    ) -> None:
        """`name`: the attribute that holds `norm`, as in the model of transformers."""
        super().__init__(std, exceptions)
        self.name = name
        self.add_module(name, norm)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output."""
        result: Tensor = x + self.mlp(self.get_submodule(self.name)(x))
        return result


class Head(InitializedLayer):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(self, name: str, norm: nn.Module, lm_head: nn.Module, std: float) -> None:
        """`name`: the attribute that holds `norm`, as in the model of transformers."""
        super().__init__(std)
        self.name = name
        self.add_module(name, norm)
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.lm_head(self.get_submodule(self.name)(x))
        return logits


def attention_cost(layer: nn.Module, context: int, width: int) -> float:
    """Return multiplications per token: all matrices, and attention of `width` features over the context."""
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1) + (
        2.0 * context * width
    )


class Rotary(nn.Module):
    """Computes cosines and sines of rotary positions, equal to those of a rotary module of transformers.

    All layers of a model share one, so that they compute the angles once.
    """

    bits: Tensor

    def __init__(self, source: Any) -> None:
        """Copy the frequencies of `source`; if on the meta device, compute them from its configuration."""
        super().__init__()
        if source.rope_type not in STEADY_ROTARY:
            raise ModelError(
                f"the model's rotary embedding is of type {source.rope_type!r}, whose angles depend on the "
                f"length of a sequence: set rope_type to {', '.join(STEADY_ROTARY)}."
            )
        if source.inv_freq.is_meta:
            with torch.device("cpu"):
                source = type(source)(source.config)
        self.scaling = float(source.attention_scaling)
        # As int32, which a plan's precision does not cast: 16-bit angles are wrong at distant positions.
        frequencies = source.inv_freq.detach().to(torch.float32, copy=True)
        self.register_buffer("bits", frequencies.view(torch.int32), persistent=False)
        self.angles = ResultCache()

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[length, frequencies]` for `like` `[batch, heads, length, size]`."""
        return self.angles.get((like.shape[2], like.dtype), like, lambda: self._computed(like))

    def _computed(self, like: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(like.shape[2], dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, self.bits.view(torch.float32))
        return (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(like.dtype)


def rotate_first(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary embedding to the first features of each head, two per angle; keep the others."""
    rotated = 2 * cosines.shape[-1]
    if rotated == x.shape[-1]:
        return rotate(x, cosines, sines)
    return torch.cat((rotate(x[..., :rotated], cosines, sines), x[..., rotated:]), dim=-1)


def heads_of(projected: Tensor, size: int) -> Tensor:
    """Return `[batch, length, heads · size]` as `[batch, heads, length, size]`, for any number of heads."""
    heads: Tensor = projected.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: nn.Dropout, window: int | None = None
) -> Tensor:
    """Return causal attention `[batch, length, heads · size]` of inputs `[batch, heads, length, size]`.

    With fewer heads of keys and values, consecutive query heads share one. `window`: the number of tokens
    that a token attends to, itself included. `dropout` applies to the weights; if it is active, the fused
    kernel is not used, because its random numbers would depend on the layout.
    """
    length = query.shape[2]
    narrow = window is not None and window < length
    if dropout.training and dropout.p:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        mask = _causal_mask(length, window, query.device)
        mixed: Tensor = dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1)) @ value
    else:
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_causal_mask(length, window, query.device) if narrow else None,
            is_causal=not narrow,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return mixed.transpose(1, 2).flatten(2)


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the bool mask `[length, length]`: True where a row's token attends to a column's."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)
