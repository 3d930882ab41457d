"""`Router`: chooses the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.tensor.experts.balance import Balance


class Router(nn.Module):
    """Chooses for each token the `top_k` experts of the largest softmax probability, ties by number."""

    keeps_dtype = frozenset({"e_score_correction_bias"})
    """Buffers that stay in their own dtype whatever a run's precision is: corrections are small."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, *, normalize: bool = True, **factory: Any
    ) -> None:
        """`normalize`: whether the weights of a token's experts add up to 1."""
        super().__init__()
        self.experts, self.top_k, self.normalize = experts, top_k, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden, **factory))
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", None)
        self.balance = Balance()
        """How the load of the experts is kept even."""
        self.attach_losses: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Set by the engine: see `StepBalance.attach`."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden [T, H]` → logits `[T, E]`, weights `[T, k]`, experts' numbers `[T, k]`, as transformers."""
        logits = functional.linear(hidden, self.weight)
        scores = self.probabilities(logits)
        bias = self.e_score_correction_bias
        indices = self._highest(scores.detach() if bias is None else scores.detach() + bias)
        weights = scores.gather(1, indices)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.attach_losses is not None:
            weights = self.attach_losses(logits, weights, indices)
        return logits, weights.to(hidden.dtype), indices

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each expert, `[T, E]`, in at least float32, for the balance loss."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    def most_probable(self, logits: Tensor) -> Tensor:
        """Return the `top_k` experts of the largest probability, without correction: int64 `[T, k]`."""
        return self._highest(self.probabilities(logits))

    def _highest(self, scores: Tensor) -> Tensor:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
