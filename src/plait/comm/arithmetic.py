"""What a reduction computes, and which algorithm does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

from plait.comm.group import Group

Op = Literal["sum", "mean", "product", "min", "max"]

EXCHANGE_LIMIT = 2**20
"""Bytes that a rank may send in all for a whole exchange to be preferred to Gloo's ring.

Measured with up to 256 KiB on two cores: 4 ranks take about half of the ring's time, 2 ranks between half and
the same; with 1 MiB on each rank and more the ring wins clearly.
"""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def flaw(op: str, dtype: torch.dtype) -> str | None:
    """What is wrong with reducing `dtype` by `op`, if anything."""
    if op not in get_args(Op):
        return f"the reduction {op!r} is none of {', '.join(get_args(Op))}"
    if dtype not in (*_FLOATS, *_WHOLE_NUMBERS):
        return f"{dtype} cannot be reduced (use view_as_real for complex numbers, else another dtype)"
    if op == "mean" and dtype in _WHOLE_NUMBERS:
        return f"{dtype} has no mean (use sum)"
    return None


def native(op: Op) -> dist.ReduceOp.RedOpType:
    """The backend's operation; a mean is a sum, divided afterwards."""
    return {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }[op]


def exchanges_whole(tensor: torch.Tensor, group: Group) -> bool:
    """Whether an all-reduce is best done by sending all of it to everyone and reducing in rank order."""
    return not tensor.is_cuda and group.uses_gloo and tensor.nbytes * group.size <= EXCHANGE_LIMIT


def fold(pieces: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    """Reduce the ranks' `pieces` into `out` in rank order; 16-bit floats are reduced in float32."""
    half = out.dtype in (torch.bfloat16, torch.float16)
    total = pieces[0].float() if half else out.copy_(pieces[0])
    for piece in pieces[1:]:
        if op == "product":
            total.mul_(piece)
        elif op == "min":
            torch.minimum(total, piece.to(total.dtype), out=total)
        elif op == "max":
            torch.maximum(total, piece.to(total.dtype), out=total)
        else:
            total.add_(piece)
    finish_mean(total, op, len(pieces))
    if half:
        out.copy_(total)


def finish_mean(total: torch.Tensor, op: Op, size: int) -> None:
    """Divide the sum in place, where a mean was asked for."""
    if op == "mean":
        total.div_(size)
