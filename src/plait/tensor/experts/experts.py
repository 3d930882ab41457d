"""`Experts`: many MLPs with gates, of which each token runs through those that a router has chosen.

Letters: T tokens, H hidden features, E experts, F inner features of one expert, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.ranks.group import Group


@dataclass(frozen=True)
class ExpertRanks:
    """Between which ranks a layer's experts are divided, and which ranks have the same tokens."""

    group: Group
    """Along `ep` × `etp`, row-major: the ranks of `etp` that hold parts of the same experts are neighbours."""
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
        """`factory`: device and dtype of the parameters, whose values are not set."""
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **factory))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner, **factory))
        self.ranks: ExpertRanks | None = None
        """Set by the engine, together with parameters that are this rank's part; None: all experts."""

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return outputs `[T, H]` of tokens `hidden [T, H]` by their experts `indices [T, k]`, `weights`."""
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = (indices == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            output = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, token, output * weights[token, place, None])
        return result
