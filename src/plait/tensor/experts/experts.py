"""`Experts`: many MLPs with gates, of which each token runs through those that a router has chosen.

Letters: T tokens, H hidden features, E experts, F inner features of one expert, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.plan.layout.layout import Shard
from plait.ranks.group import Group


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks between which the experts of a layer are divided, and those that hold the same tokens."""

    group: Group
    """Along `ep` × `etp`, row-major: ranks of `etp`, which hold parts of the same experts, are neighbours."""
    etp: int
    """How many ranks hold each expert, some of its inner features each."""
    tokens: Group
    """Ranks that give the same tokens to the layer, of which each sends a slice to the experts; the ranks of
    `tp`, or a group of one rank where each has tokens of its own."""


class Experts(nn.Module):
    """E MLPs with gates; returns for each token the weighted sum of the outputs of its experts.

    `gate_up_proj [E, 2F, H]` (all rows of the gate, then those of `up`) and `down_proj [E, H, F]`, as in
    transformers. Expert e computes `down_proj[e] (silu(gate) · up)`.
    """

    def __init__(self, hidden: int, inner: int, experts: int, **factory: Any) -> None:
        """`factory`: device and dtype of the parameters."""
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **factory))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner, **factory))
        self.ranks: ExpertRanks | None = None
        """Set by the engine, together with parameters that are this rank's part; None: all experts."""
        self.inner_shards: dict[str, Shard | None] = {
            "gate_up_proj": Shard(1, blocks=2),
            "down_proj": Shard(2),
        }
        """By parameter, how `etp` divides its inner features; None: each rank has all of it."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters to random values, as those of `nn.Linear`: uniform within 1 / sqrt(inputs)."""
        for parameter in self.parameters():
            bound = parameter.shape[-1] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """`hidden [T, H]`, numbers of the tokens' experts `indices [T, k]`, `weights [T, k]` → `[T, H]`."""
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = (indices == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            output = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, token, output * weights[token, place, None])
        return result
