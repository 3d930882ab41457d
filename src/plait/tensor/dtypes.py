"""Torch dtypes of a plan's precisions, and conversion of tensors to them."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.plan.parameter_units import PRECISIONS, Dtype
from plait.plan.plan import Precision

DTYPES: dict[Precision | None, torch.dtype | None] = {
    None: None,
    **{precision: getattr(torch, dtype.name) for precision, dtype in PRECISIONS.items()},
}
"""None: the dtype of the model's own tensor."""


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the `torch.dtype` that has the name of `dtype`."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def named_dtype(dtype: torch.dtype) -> Dtype:
    """Return the name and the element size in bytes of a `torch.dtype`: inverse of `torch_dtype`."""
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)


def convert(value: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return a copy of `value` on `device`; floating-point values are converted to `dtype`, if given."""
    kept = value.dtype if dtype is None or not value.is_floating_point() else dtype
    return torch.empty_like(value, device=device, dtype=kept).copy_(value)
