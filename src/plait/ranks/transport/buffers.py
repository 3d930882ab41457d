"""Buffers of a transport: contiguous tensors without autograd, and their memory as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` detached and contiguous: an alias where it is contiguous already, else a copy."""
    return tensor.detach().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat byte view of a contiguous tensor of any dtype: backends support only some dtypes."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # of one element or none, which is contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def output_buffer(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of `shape` to receive into: `out` if it is contiguous, else a new one."""
    if out is not None and out.is_contiguous():
        return out.detach()
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def copy_out(received: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Copy `received` to `out`, unless they share memory, and return `out`; without it, `received`."""
    if out is None:
        return received
    if not out.is_contiguous():
        out.detach().copy_(received)
    return out
