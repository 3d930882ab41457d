"""What a reduction computes, and which algorithm does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

from plait.comm.group import Group

Op = Literal["sum", "mean", "product", "min", "max"]

Way = Literal["whole", "pieces", "exchange", "backend"]
"""How to reduce. Tensors are shown to all in shared memory (`nearby`), and each rank reduces all that it
gets, or a piece for all; or they are sent to all; or the backend does it."""

WHOLE_LIMIT = 2**21
"""Bytes that all ranks together may show for each to reduce all itself; beyond, each reduces a piece."""
SHOW_LIMIT = 2**25
"""Bytes of a tensor that is shown in shared memory: once or twice as much stays taken there on each rank."""
EXCHANGE_LIMIT = 2**20
"""Bytes that a rank may send in all for a whole exchange to be preferred to Gloo's ring."""
BLOCK = 2**16
"""Elements that are reduced at once, so that the total stays in the cache."""

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


def way_to_all_reduce(tensor: torch.Tensor, group: Group) -> Way:
    """The algorithm, by what all ranks know alike. Measured in `benchmarks/collectives`, for each choice."""
    if tensor.device.type != "cpu" or not group.uses_gloo:
        return "backend"
    together = tensor.nbytes * group.size
    if group.on_one_host and tensor.nbytes <= SHOW_LIMIT:
        return "whole" if together <= WHOLE_LIMIT else "pieces"
    return "exchange" if together <= EXCHANGE_LIMIT else "backend"


def way_to_reduce_scatter(tensor: torch.Tensor, group: Group) -> Way:
    """Likewise. Gloo's own is a whole all-reduce, so it is never the way."""
    if tensor.device.type != "cpu" or not group.uses_gloo:
        return "backend"
    return "whole" if group.on_one_host and tensor.nbytes <= SHOW_LIMIT else "exchange"


def way_to_all_gather(tensor: torch.Tensor, group: Group) -> Way:
    """Likewise: shown in shared memory, or by the backend, whose way moves as little as possible."""
    if tensor.device.type != "cpu" or not group.uses_gloo:
        return "backend"
    return "whole" if group.on_one_host and tensor.nbytes <= SHOW_LIMIT else "backend"


def fold(pieces: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    """Reduce the ranks' flat `pieces` into `out` in rank order; 16-bit floats are reduced in float32.

    `out` may be one of the first two pieces, but overlap no piece otherwise.
    """
    for *block, total in blocks((*pieces, out)):
        _fold_block(block, op, total)


def blocks(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Flat tensors of one size cut alike, in pieces that fit the cache together."""
    size = tensors[0].numel()
    if size <= BLOCK:
        return iter((tensors,))
    return zip(*(torch.split(tensor, BLOCK) for tensor in tensors), strict=True)


def _fold_block(pieces: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    half = out.dtype in (torch.bfloat16, torch.float16)
    total = torch.empty_like(out, dtype=torch.float32) if half else out
    before = pieces[0].float() if half else pieces[0]
    for piece in pieces[1:]:
        _combine(before, piece.float() if half else piece, op, total)
        before = total
    finish_mean(total, op, len(pieces))
    if half:
        out.copy_(total)


def _combine(a: torch.Tensor, b: torch.Tensor, op: Op, out: torch.Tensor) -> None:
    if op == "product":
        torch.mul(a, b, out=out)
    elif op == "min":
        torch.minimum(a, b, out=out)
    elif op == "max":
        torch.maximum(a, b, out=out)
    else:
        torch.add(a, b, out=out)


def finish_mean(total: torch.Tensor, op: Op, size: int) -> None:
    """Divide the sum in place, where a mean was asked for."""
    if op == "mean":
        total.div_(size)
