"""Dropout masks from a counter-based generator: each element is a function of a key and its global index.

So a rank computes only its piece of a mask. The index of element
`(i0, i1, i2)` of a tensor of sizes `(D0, D1, D2)` is `(i0 · D1 + i1) · D2 + i2`. The generator is made of
splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"): 64-bit integer
arithmetic, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import ModelError

# The constants of splitmix64, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BLOCK = {"cpu": 2**15, "meta": 2**15}
"""Elements per block, so that temporaries stay in a CPU's cache."""
BLOCK_ON_ACCELERATORS = 2**20


class DimPiece(NamedTuple):
    """The start of a piece of a dim, and the size of the whole dim (for dim 0 the size is not used)."""

    start: int
    whole: int


class _Dim(NamedTuple):
    size: int
    start: int
    whole: int


def keep_mask(
    key: int, shape: Sequence[int], p: float, pieces: Mapping[int, DimPiece], device: torch.device
) -> Tensor:
    """Return the dropout mask of a piece of a tensor: bool `shape`, each element False with probability `p`.

    `key` is a signed 64-bit integer. `pieces` locates the piece in the whole tensor, by dim; other dims are
    whole. The mask is equal on every device; on meta nothing is computed. ModelError where `pieces` names a
    dim that the tensor does not have, or one dim twice, or where a piece ends behind the whole.
    """
    dims = _joined(_dims(shape, pieces))
    keep = torch.empty(prod(shape), dtype=torch.bool, device=device)
    if p >= 1.0:
        return keep.fill_(False).view(tuple(shape))
    block = BLOCK.get(device.type, BLOCK_ON_ACCELERATORS)
    # On meta one block suffices to trace the memory.
    for first in range(0, min(len(keep), block) if keep.is_meta else len(keep), block):
        block_mask = keep[first : first + block]
        bits = _mixed(_indexes(first, len(block_mask), dims, device), key)
        torch.ge(bits, int(p * 2**64) - 2**63, out=block_mask)
    return keep.view(tuple(shape))


def _dims(shape: Sequence[int], pieces: Mapping[int, DimPiece]) -> list[_Dim]:
    dims = [_Dim(size, 0, size) for size in shape]
    if len({dim % max(1, len(shape)) for dim in pieces}) < len(pieces):
        raise ModelError(
            f"dropout was given a tensor of shape {list(shape)} and two pieces of one dim, among the dims "
            f"{', '.join(map(str, pieces))}: name each dim once (dim 0 is the micro-batch's rows)."
        )
    for dim, piece in pieces.items():
        if not -len(shape) <= dim < len(shape):
            raise ModelError(
                f"dropout was given a tensor of shape {list(shape)} and a piece of its dim {dim}, which it "
                "does not have: name another dim."
            )
        size = shape[dim]
        if dim % len(shape) and piece.start + size > piece.whole:
            raise ModelError(
                f"dropout was given elements {piece.start} … {piece.start + size - 1} of dim {dim}, whose "
                f"whole size is {piece.whole}: give the piece that lies within it."
            )
        dims[dim] = _Dim(size, *piece)
    return dims


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Merge each dim that is not divided into the dim before it, so that as few dims as possible remain."""
    joined: list[_Dim] = []
    for dim in dims:
        if joined and dim.start == 0 and dim.size == dim.whole:
            before = joined.pop()
            dim = _Dim(*(number * dim.whole for number in before))
        joined.append(dim)
    return joined


def _indexes(first: int, count: int, dims: Sequence[_Dim], device: torch.device) -> Tensor:
    """Return the global indexes of the elements `first … first + count - 1` of a piece: int64 `[count]`."""
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
    """Return 64 random bits for each element index, a function of index and `key`. Overwrites `index`."""
    bits = index.mul_(_GOLDEN).add_(key)
    _fold(bits, 30).mul_(_FIRST)
    # The key again: else one key's numbers would be another key's at shifted indexes.
    bits ^= key
    _fold(bits, 27).mul_(_SECOND)
    return _fold(bits, 31)


def _fold(bits: Tensor, count: int) -> Tensor:
    """Return `bits ^ bits >> count`, in place, with a logical shift."""
    shifted = bits >> count
    shifted &= (1 << (64 - count)) - 1
    bits ^= shifted
    return bits
