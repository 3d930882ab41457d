"""The few calls of `torch.distributed` that differ between its versions, and how tensors are handed to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from plait.comm.group import Group

_Single = Callable[..., "dist.Work | None"]


def all_gather_single(output: torch.Tensor, input: torch.Tensor, group: Group) -> dist.Work | None:
    """Start an all-gather into one tensor; torch 2.13 renamed the function and warns about the old name."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(_Single, function)(output, input, group=group.process_group, async_op=True)


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Group
) -> dist.Work | None:
    """Start a reduce-scatter of one tensor; renamed likewise."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(_Single, function)(output, input, op=op, group=group.process_group, async_op=True)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd and contiguous: itself (an alias) where it is already, else a copy."""
    return tensor.detach().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of any dtype and shape as a flat view of bytes: backends know only some dtypes."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # of one element or none, which is contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def landing(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Contiguous memory of `shape` for what will arrive: `out` itself where that is possible."""
    if out is not None and out.is_contiguous():
        return out.detach()
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def deliver(arrived: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, holding what arrived in `landing(out, ...)` or `dense(out)`; without `out`, what arrived."""
    if out is None:
        return arrived
    if not out.is_contiguous():
        out.detach().copy_(arrived)
    return out


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape as text, e.g. `float32[4, 6]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
