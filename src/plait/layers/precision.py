"""The dtype that a plan's precision stands for, and tensors brought to it."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.plan import Precision

DTYPES: dict[Precision | None, torch.dtype | None] = {
    None: None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""None: as the model has it."""


def convert(value: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A copy of `value` on `device`; floating-point numbers get `dtype`, if given."""
    kept = value.dtype if dtype is None or not value.is_floating_point() else dtype
    return torch.empty_like(value, device=device, dtype=kept).copy_(value)
