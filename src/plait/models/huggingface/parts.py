"""What the families share: a layer around modules of others, rotary positions, and causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.models.initial import Constant, Initial, Normal
from plait.models.rotary import rotate

STEADY_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on a sequence's length."""


class Layer(nn.Module):
    """Base of the layers: how their parameters start, and what they cost."""

    def __init__(self, spread: float, exceptions: Mapping[str, float] | None = None) -> None:
        """`spread`: of initial matrices; `exceptions`: of those of modules of these names."""
        super().__init__()
        self.spread, self.exceptions = spread, dict(exceptions or {})

    def initial_values(self) -> dict[str, Initial]:
        """As transformers draws them: matrices normally, norms at one, biases at zero."""
        found: dict[str, Initial] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            module = name.split(".")[-2]
            if parameter.dim() > 1:
                found[name] = Normal(self.exceptions.get(module, self.spread))
            else:
                found[name] = Constant(1.0) if name.endswith(".weight") else Constant(0.0)
        return found


def attention_cost(layer: nn.Module, context: int, width: int) -> float:
    """Multiplications a token: all matrices, and scores and mix of `width` features over a whole context."""
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1) + (
        2.0 * context * width
    )


class Rotary(nn.Module):
    """The angles of rotary positions, as a rotary module of transformers would give them."""

    bits: Tensor

    def __init__(self, source: Any) -> None:
        """With the frequencies of `source`, or, if that is on the meta device, those of its configuration."""
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
        # As bits, which a plan's precision does not round: in 16 bits they would turn far positions wrongly.
        frequencies = source.inv_freq.detach().to(torch.float32, copy=True)
        self.register_buffer("bits", frequencies.view(torch.int32), persistent=False)

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[length, frequencies]` for `[batch, heads, length, size]`, in its dtype."""
        positions = torch.arange(like.shape[2], dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, self.bits.view(torch.float32))
        return (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(like.dtype)


def rotate_first(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`rotate` for as many features of each head as there are angles for; the rest stay."""
    turning = 2 * cosines.shape[-1]
    if turning == x.shape[-1]:
        return rotate(x, cosines, sines)
    return torch.cat((rotate(x[..., :turning], cosines, sines), x[..., turning:]), dim=-1)


def heads_of(projected: Tensor, size: int) -> Tensor:
    """`[batch, length, heads · size]` as `[batch, heads, length, size]`, for any number of heads."""
    heads: Tensor = projected.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: nn.Dropout, window: int | None = None
) -> Tensor:
    """Causal attention of `[batch, heads, length, size]`: `[batch, length, heads · size]`.

    Fewer heads of keys and values are each read by as many query heads in a row. `window`: how many tokens
    back, itself included, a token sees. `dropout` drops weights; if it does, the fused kernel is not used,
    because its random numbers would depend on the layout.
    """
    length = query.shape[2]
    narrow = window is not None and window < length
    if dropout.training and dropout.p:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        seen = _seen(length, window, query.device)
        mixed: Tensor = dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1)) @ value
    else:
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_seen(length, window, query.device) if narrow else None,
            is_causal=not narrow,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return mixed.transpose(1, 2).flatten(2)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which tokens (columns) a token (row) sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)
