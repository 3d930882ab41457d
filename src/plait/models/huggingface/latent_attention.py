"""The latent attention of DeepSeek-V3 (MLA): keys and values of all heads are computed from a short vector.

    x ─ q_a_proj ─ norm ───────────┐          ┌─ q_b_proj ──→ queries: a part as it is, a rotated part
    x ─ kv_a_proj_with_mqa ┬ norm ─┼─ latents ┼─ kv_b_proj ─→ keys as they are, and values
                           └───────┘          └──────────────→ the rotated part of the keys, one for all heads

Every rank of `tp` computes all latents, and its own heads from them; they enter its region in one tensor, as
wide as they are, where other attention's input is as wide as the model. Without `q_a_proj`, `q_proj` computes
queries from x. Keys are wider than values.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1; the scale of the scores with YaRN is that of
transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.huggingface.common import Branch, Rotary, add_branch, attention_parts, residual
from plait.models.model_helpers import InitializedLayer, attention_cost
from plait.models.rotary import Angles, rotate
from plait.plan.rules import Rules, column, entrance, row
from plait.tensor.attention.attention import attend, heads_of, share_keys

_HEADS = "config.num_attention_heads"


def is_latent(attn: nn.Module) -> bool:
    """Return whether an attention of transformers computes keys and values from latents."""
    return hasattr(attn, "kv_a_proj_with_mqa")


def latent_rules(attn: nn.Module) -> Rules:
    """Return the tensor-parallel rules of a `LatentAttention`, by names in it.

    Heads are divided, latents are whole.
    """
    queries = "q_b_proj" if _has_query_latents(attn) else "q_proj"
    keys_and_values = column.by(_HEADS).interleave("qk_nope_head_dim", "v_head_dim")
    linears = {queries: column.by(_HEADS), "kv_b_proj": keys_and_values, "o_proj": row.by(_HEADS)}
    return {"latents": entrance, **{f"self_attn.{name}": rule for name, rule in linears.items()}}


def _has_query_latents(attn: Any) -> bool:
    return getattr(attn, "q_a_proj", None) is not None


class LatentAttention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + latent attention(x), with its norms and dropout."""

    def __init__(self, block: Any, branch: Branch, rotary: Rotary, std: float) -> None:
        super().__init__(std)
        self.branch = add_branch(self, block, branch)
        attn = block.self_attn
        self.self_attn: Any = attention_parts(attn)
        self.latents = nn.Identity()  # where they enter the region of tp
        self.has_query_latents = _has_query_latents(attn)
        self.rotary = rotary
        self.context: int = attn.config.max_position_embeddings
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(attn.attention_dropout)
        self.attention_dropout.train(attn.training)
        rotary.require_all_features(attn.qk_rope_head_dim)
        if attn.num_key_value_groups != 1:
            raise ModelError(
                f"num_key_value_heads is {attn.config.num_key_value_heads}, where latent attention has a key "
                f"for each of {attn.config.num_attention_heads} heads: set it to that number."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank has some heads."""
        return residual(self, x, self.branch, self._attention)

    def _attention(self, normed: Tensor) -> Tensor:
        attn = self.self_attn
        computed = self._latents(normed)
        entered = self.latents(torch.cat(computed, -1))
        of_queries, of_keys, rotated = torch.split(entered, [one.shape[-1] for one in computed], -1)
        angles = self.rotary(entered)
        count = attn.o_proj.weight.shape[1] // attn.v_head_dim  # of heads on this rank
        keys = share_keys(*self._keys_and_values(of_keys, rotated, angles), query_heads=count)
        query = self._queries(of_queries, angles)  # while keys and values are sent
        mixed = attend(query, keys, scale=attn.scaling, dropout=self.attention_dropout)
        output: Tensor = attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _latents(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latents of queries, the latents of keys and values, and the rotated part of keys."""
        attn = self.self_attn
        of_queries = attn.q_a_layernorm(attn.q_a_proj(normed)) if self.has_query_latents else normed
        both = attn.kv_a_proj_with_mqa(normed)
        of_keys, rotated = torch.split(both, [attn.kv_lora_rank, attn.qk_rope_head_dim], -1)
        return of_queries, attn.kv_a_layernorm(of_keys), rotated

    def _queries(self, latents: Tensor, angles: Angles) -> Tensor:
        attn = self.self_attn
        project = attn.q_b_proj if self.has_query_latents else attn.q_proj
        heads = heads_of(project(latents), attn.qk_head_dim)
        plain, rotated = torch.split(heads, [attn.qk_nope_head_dim, attn.qk_rope_head_dim], -1)
        return torch.cat((plain, self._rotated(rotated, angles)), -1)

    def _keys_and_values(self, latents: Tensor, rotated: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        attn = self.self_attn
        heads = heads_of(attn.kv_b_proj(latents), attn.qk_nope_head_dim + attn.v_head_dim)
        plain, value = torch.split(heads, [attn.qk_nope_head_dim, attn.v_head_dim], -1)
        shared = self._rotated(rotated.unsqueeze(1), angles).expand(-1, plain.shape[1], -1, -1)
        return torch.cat((plain, shared), -1), value

    def _rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """Return features of heads rotated by position; with `rope_interleave` neighbours are pairs."""
        if self.self_attn.config.rope_interleave:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return rotate(x, *angles)

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        attn = self.self_attn
        width = attn.config.num_attention_heads * (attn.qk_head_dim + attn.v_head_dim) // 2
        return attention_cost(self, self.context, width)
