"""The dtypes of a plan's precisions, and the conversion of tensors to them."""

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
"""None: the dtype of the model's own tensor."""


def convert(value: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return a copy of `value` on `device`; floating-point values are converted to `dtype`, if given."""
    kept = value.dtype if dtype is None or not value.is_floating_point() else dtype
    return torch.empty_like(value, device=device, dtype=kept).copy_(value)
