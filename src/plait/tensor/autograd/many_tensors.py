"""Operations on many tensors at once: on a GPU few kernels, which the host starts by one call.

`torch._foreach_add_` and its like have private names, but all optimizers of torch build on them;
`tests/unit/tensor/autograd/test_many_tensors.py` shows what is relied on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ranks.device import is_accelerator


def zero_each(tensors: list[Tensor]) -> None:
    """Fill tensors with zeros."""
    if tensors:
        torch._foreach_zero_(tensors)


def multiply_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, 0-d, of their dtype and device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def add_each(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Add each gradient to its total in place; totals may have a wider dtype."""
    if not totals:
        return
    if is_accelerator(totals[0]) and any(
        total.dtype != one.dtype for total, one in zip(totals, gradients, strict=True)
    ):
        gradients = _in_dtypes_of(totals, gradients)  # unlike dtypes would be added one by one
    torch._foreach_add_(totals, gradients)


def _in_dtypes_of(totals: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients in the dtypes of their totals: in two operations, if they have one dtype each."""
    alike = len({one.dtype for one in totals}) == len({one.dtype for one in gradients}) == 1
    if not alike:
        return [one.to(total.dtype) for total, one in zip(totals, gradients, strict=True)]
    flat = torch.cat([one.reshape(-1) for one in gradients]).to(totals[0].dtype)
    parts = torch.split(flat, [one.numel() for one in gradients])
    return [part.view(total.shape) for part, total in zip(parts, totals, strict=True)]
