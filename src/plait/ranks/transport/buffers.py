"""Buffers of a transport: contiguous, without autograd, viewed as bytes; their reduction in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

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


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text, e.g. `float32[4, 6]`."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def shown(versions: Mapping[str, Sequence[int]]) -> str:
    """Return the ranks' differing texts as one text: `rank 0: …; ranks 1, 2: …`."""
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in versions.items()
    )


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
