"""Masks of dropout from a counter-based generator: each element is a function of a key and its global index.

So a rank makes the part of a mask that its piece of a tensor needs, and nothing more. The index of element
`(i0, i1, i2)` of a tensor of sizes `(D0, D1, D2)` is `(i0 · D1 + i1) · D2 + i2`. The generator is made of
splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"): whole numbers of 64 bits,
which every device multiplies alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import ModelError

# Of splitmix64, as whole numbers of 64 bits with a sign.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BLOCK = {"cpu": 2**15, "meta": 2**15}
"""Elements that are made at once: what is needed for that stays in a CPU's cache."""
BLOCK_ON_ACCELERATORS = 2**20


class Span(NamedTuple):
    """Where a piece of a dim begins, and the size of the whole dim. (That of dim 0 does not matter.)"""

    start: int
    whole: int


class _Dim(NamedTuple):
    size: int
    start: int
    whole: int


def keep_mask(
    key: int, shape: Sequence[int], p: float, spans: Mapping[int, Span], device: torch.device
) -> Tensor:
    """Which elements of a piece of a tensor are kept: bool `shape`, each False with probability `p`.

    `key` is a whole number of 64 bits with a sign. `spans` says, by dim, which piece of the whole tensor it
    is; dims that are not in it are whole. Equal on every device; on meta nothing is computed. ModelError
    where a span names no dim of the tensor, or one twice, or a piece ends behind the whole.
    """
    dims = _joined(_dims(shape, spans))
    keep = torch.empty(prod(shape), dtype=torch.bool, device=device)
    if p >= 1.0:
        return keep.fill_(False).view(tuple(shape))
    block = BLOCK.get(device.type, BLOCK_ON_ACCELERATORS)
    # On meta one block shows what memory it takes.
    for first in range(0, min(len(keep), block) if keep.is_meta else len(keep), block):
        part = keep[first : first + block]
        drawn = _mixed(_indexes(first, len(part), dims, device), key)
        torch.ge(drawn, int(p * 2**64) - 2**63, out=part)
    return keep.view(tuple(shape))


def _dims(shape: Sequence[int], spans: Mapping[int, Span]) -> list[_Dim]:
    dims = [_Dim(size, 0, size) for size in shape]
    if len({dim % max(1, len(shape)) for dim in spans}) < len(spans):
        raise ModelError(
            f"dropout was given a tensor of shape {list(shape)} and two pieces of one dim, among the dims "
            f"{', '.join(map(str, spans))}: name each dim once (dim 0 is the micro-batch's rows)."
        )
    for dim, span in spans.items():
        if not -len(shape) <= dim < len(shape):
            raise ModelError(
                f"dropout was given a tensor of shape {list(shape)} and a piece of its dim {dim}, which it "
                "does not have: name another dim."
            )
        size = shape[dim]
        if dim % len(shape) and span.start + size > span.whole:
            raise ModelError(
                f"dropout was given elements {span.start} … {span.start + size - 1} of dim {dim}, whose "
                f"whole size is {span.whole}: give the piece that lies within it."
            )
        dims[dim] = _Dim(size, *span)
    return dims


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """The same with as few dims as can be: one that is whole is a part of the one before."""
    joined: list[_Dim] = []
    for dim in dims:
        if joined and dim.start == 0 and dim.size == dim.whole:
            before = joined.pop()
            dim = _Dim(*(number * dim.whole for number in before))
        joined.append(dim)
    return joined


def _indexes(first: int, count: int, dims: Sequence[_Dim], device: torch.device) -> Tensor:
    """The global indexes of `count` elements of a piece, from its element `first` on; int64 `[count]`."""
    left = torch.arange(first, first + count, dtype=torch.int64, device=device)
    if len(dims) <= 1:
        return left.add_(dims[0].start if dims else 0)
    index, stride = torch.zeros_like(left), 1
    for dim in reversed(dims[1:]):
        index += (left % dim.size).add_(dim.start).mul_(stride)
        left //= dim.size
        stride *= dim.whole
    return index.add_(left.add_(dims[0].start), alpha=stride)


def _mixed(index: Tensor, key: int) -> Tensor:
    """64 random bits for each index, in its memory."""
    bits = index.mul_(_GOLDEN).add_(key)
    _fold(bits, 30).mul_(_FIRST)
    # Once more: else the numbers of one key would be those of another, at other places.
    bits ^= key
    _fold(bits, 27).mul_(_SECOND)
    return _fold(bits, 31)


def _fold(bits: Tensor, count: int) -> Tensor:
    """`bits ^ bits >> count`, in place; the sign is shifted as any other bit."""
    shifted = bits >> count
    shifted &= (1 << (64 - count)) - 1
    bits ^= shifted
    return bits
