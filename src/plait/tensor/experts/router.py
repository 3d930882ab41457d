"""`Router`: chooses the experts of each token, and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Router(nn.Module):
    """Chooses for each token the `top_k` experts of the largest softmax probability, ties by number."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, *, normalize: bool = True, **factory: Any
    ) -> None:
        """`normalize`: whether the weights of a token's experts add up to 1."""
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to random values, as that of `nn.Linear`: uniform within 1 / sqrt(inputs)."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden [T, H]` → logits `[T, E]`, weights `[T, k]`, experts' numbers `[T, k]`, as transformers."""
        logits = functional.linear(hidden, self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(wide).softmax(-1)
        indices = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(1, indices)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden.dtype), indices
