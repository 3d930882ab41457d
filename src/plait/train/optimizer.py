"""The optimizer of a training run."""

from __future__ import annotations

from typing import Any

import torch

from plait.train.sections import TrainConfig


def adamw(groups: list[dict[str, Any]], settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW on parameter groups that say their own weight decay."""
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
