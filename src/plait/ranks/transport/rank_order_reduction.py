"""Reduction of the tensors of all ranks in the order of their numbers, so that every rank gets equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch

Op = Literal["sum", "mean", "product", "min", "max"]


BLOCK = 2**16
"""Elements reduced at once, so that the total stays in the cache."""


_COMBINE: Mapping[Op, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def reduction_error(op: str, dtype: torch.dtype) -> str | None:
    """Return why tensors of `dtype` cannot be reduced by `op`, or None."""
    if op not in get_args(Op):
        return f"the reduction {op!r} is none of {', '.join(get_args(Op))}"
    if dtype not in (*_FLOATS, *_WHOLE_NUMBERS):
        return f"{dtype} cannot be reduced (use view_as_real for complex numbers, else another dtype)"
    if op == "mean" and dtype in _WHOLE_NUMBERS:
        return f"{dtype} has no mean (use sum)"
    return None


def fold(ranges: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    """Reduce the ranks' flat tensors `ranges` into `out`, in rank order; 16-bit floats in float32.

    `out` may be one of the first two ranges, but overlap no range otherwise.
    """
    for *block, total in blocks((*ranges, out)):
        _fold_block(block, op, total)


def blocks(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Yield tuples of corresponding blocks of equally long flat tensors, small enough for the CPU's cache."""
    size = tensors[0].numel()
    if size <= BLOCK:
        return iter((tensors,))
    return zip(*(torch.split(tensor, BLOCK) for tensor in tensors), strict=True)


def _fold_block(ranges: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    half = out.dtype in (torch.bfloat16, torch.float16)
    total = torch.empty_like(out, dtype=torch.float32) if half else out
    before = ranges[0].float() if half else ranges[0]
    for one in ranges[1:]:
        _COMBINE[op](before, one.float() if half else one, out=total)
        before = total
    divide_mean(total, op, len(ranges))
    if half:
        out.copy_(total)


def divide_mean(total: torch.Tensor, op: Op, size: int) -> None:
    """Divide `total`, the sum over `size` ranks, by `size` in place if `op` is the mean."""
    if op == "mean":
        total.div_(size)
