"""Dropout masks from a counter-based generator: each element is a function of a key and its global index.

So a rank computes only its part of a mask. The index of element
`(i0, i1, i2)` of a tensor of sizes `(D0, D1, D2)` is `(i0 · D1 + i1) · D2 + i2`. The generator is made of
splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"): 64-bit integer
arithmetic, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.position_marks import gives_positions

# The constants of splitmix64, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BLOCK = {"cpu": 2**15, "meta": 2**15}
"""Elements per block, so that temporaries stay in a CPU's cache."""
BLOCK_ON_ACCELERATORS = 2**21
"""Elements per block on a GPU: 48 MiB of temporaries, and kernels that take longer than their launch."""


class MaskKey(NamedTuple):
    """A dropout mask's random key in device memory, so that replayed CUDA graphs compute other masks."""

    key: Tensor
    """0-d int64."""
    first: Tensor
    """0-d int64: `first_bits` of the key and the mask's first row, which its parts then leave out."""


class DimPart(NamedTuple):
    """A range of a tensor's dim that a rank holds: its first index, and the size of the whole dim."""

    start: int
    whole: int
    step: int = 1
    """The distance of neighbours of the part in the whole dim."""


class DimRanges(NamedTuple):
    """A part of a dim that consists of several ranges, one after another; and the size of the whole dim."""

    ranges: Sequence[range]
    whole: int


class _Dim(NamedTuple):
    size: int
    start: int
    whole: int
    step: int = 1


@gives_positions
def keep_mask(
    key: int | MaskKey, shape: Sequence[int], p: float, parts: Mapping[int, DimPart], device: torch.device
) -> Tensor:
    """Return the dropout mask of a part of a tensor: bool `shape`, each element False with probability `p`.

    `key` is a signed 64-bit integer, or where it is in memory. `parts` locates the part in the whole tensor,
    by dim; other dims are whole. The mask is equal on every device; on meta nothing is computed. ModelError
    where `parts` names a dim that the tensor does not have, or one dim twice, or where a part ends behind the
    whole.
    """
    dims = _joined(_dims(shape, parts))
    keep = torch.empty(prod(shape), dtype=torch.bool, device=device)
    if p >= 1.0 or not len(keep):
        return keep.fill_(False).view(tuple(shape))
    blocks = _Blocks.of(dims, BLOCK.get(device.type, BLOCK_ON_ACCELERATORS))
    tile = blocks.tile(device)
    # A single block may overwrite the tile.
    work = tile, tile if len(tile) == len(keep) else torch.empty_like(tile)
    done = 0
    for count, first in blocks.each():
        steps, bits = work if count == len(tile) else (one[:count] for one in work)
        if isinstance(key, MaskKey):
            torch.add(steps, key.first, out=bits)
            bits += _signed(first * _GOLDEN)
            _mix(bits, key.key)
        else:
            torch.add(steps, _signed(first * _GOLDEN + key), out=bits)
            _mix(bits, key)
        block_mask = keep if count == len(keep) else keep[done : done + count]
        torch.ge(bits, int(p * 2**64) - 2**63, out=block_mask)
        done += count
        if keep.is_meta:
            break  # one block suffices to trace the memory
    return keep.view(tuple(shape))


def first_bits(key: int, index: int) -> int:
    """Return the 64-bit state, which the generator mixes, of the element at `index` of the whole tensor."""
    return _signed(index * _GOLDEN + key)


def keep_mask_of_ranges(
    key: int | MaskKey,
    shape: Sequence[int],
    p: float,
    parts: Mapping[int, DimPart],
    ranges: Mapping[int, DimRanges],
    device: torch.device,
) -> Tensor:
    """Return the dropout mask, as `keep_mask`, of a part that has several ranges along some dims."""
    if not ranges:
        return keep_mask(key, shape, p, parts, device)
    dim = next(iter(ranges))
    others = {other: those for other, those in ranges.items() if other != dim}
    masks = []
    for one in ranges[dim].ranges:
        part = [len(one) if number == dim else size for number, size in enumerate(shape)]
        located = {**parts, dim: DimPart(one.start, ranges[dim].whole, one.step)}
        masks.append(keep_mask_of_ranges(key, part, p, located, others, device))
    if not masks:
        return torch.empty(tuple(shape), dtype=torch.bool, device=device)
    return masks[0] if len(masks) == 1 else torch.cat(masks, dim)


def _dims(shape: Sequence[int], parts: Mapping[int, DimPart]) -> list[_Dim]:
    dims = [_Dim(size, 0, size) for size in shape]
    if len({dim % max(1, len(shape)) for dim in parts}) < len(parts):
        raise ModelError(
            f"dropout was given a tensor of shape {list(shape)} and two parts of one dim, among the dims "
            f"{', '.join(map(str, parts))}: name each dim once (dim 0 is the micro-batch's rows)."
        )
    for dim, part in parts.items():
        if not -len(shape) <= dim < len(shape):
            raise ModelError(
                f"dropout was given a tensor of shape {list(shape)} and a part of its dim {dim}, which it "
                "does not have: name another dim."
            )
        size = shape[dim]
        last = part.start + (size - 1) * part.step
        if dim % len(shape) and last >= part.whole:
            raise ModelError(
                f"dropout was given elements {part.start} … {last} of dim {dim}, whose whole size is "
                f"{part.whole}: give the part that lies within it."
            )
        dims[dim] = _Dim(size, part.start, part.whole, part.step if size > 1 else 1)
    return dims


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Merge each dim that the part covers whole into the dim before it, so that few dims remain."""
    joined: list[_Dim] = []
    for dim in dims:
        if joined and joined[-1].step == 1 and dim.start == 0 and dim.size == dim.whole:
            before = joined.pop()
            dim = _Dim(before.size * dim.whole, before.start * dim.whole, before.whole * dim.whole)
        joined.append(dim)
    return joined


class _Blocks(NamedTuple):
    """Division of a part into blocks: one index per dim before `cut`, a range of `cut`, later dims whole.

    Indexes in a block are those of the first block plus a constant, so that one tile serves all blocks.
    """

    dims: Sequence[_Dim]
    start: int
    """The index of the part's first element in the whole tensor."""
    strides: Sequence[int]
    """The distance of the part's neighbours along each dim, in the whole tensor."""
    cut: int
    """The dim that is cut into blocks; the dims before it have one index in a block."""
    rows: int
    """The number of indexes of that dim in a block."""
    inner: int
    """The number of elements of a block for one index of that dim."""

    @staticmethod
    def of(dims: Sequence[_Dim], most: int) -> _Blocks:
        """Return the division of a tensor part into blocks of at most `most` elements."""
        dims = dims or [_Dim(1, 0, 1)]
        strides = [1]
        for dim in reversed(dims[1:]):
            strides.insert(0, strides[0] * dim.whole)
        cut, inner = len(dims) - 1, 1
        while cut and inner * dims[cut].size <= most:
            inner *= dims[cut].size
            cut -= 1
        start = sum(dim.start * stride for dim, stride in zip(dims, strides, strict=True))
        strides = [dim.step * stride for dim, stride in zip(dims, strides, strict=True)]
        return _Blocks(dims, start, strides, cut, min(dims[cut].size, most // inner), inner)

    def tile(self, device: torch.device) -> Tensor:
        """Return each block element's index in the whole tensor, less the first one's, times `_GOLDEN`."""
        tile = _steps(self.rows, self.strides[self.cut], device)
        for number in range(self.cut + 1, len(self.dims)):
            tile = tile.unsqueeze(1) + _steps(self.dims[number].size, self.strides[number], device)
            tile = tile.view(-1)
        return tile

    def each(self) -> Iterator[tuple[int, int]]:
        """Yield each block's number of elements, and the index of its first element in the whole tensor."""
        size, stride = self.dims[self.cut].size, self.strides[self.cut]
        for indexes in product(*(range(dim.size) for dim in self.dims[: self.cut])):
            first = self.start + sum(map(mul, indexes, self.strides))
            for row in range(0, size, self.rows):
                yield min(self.rows, size - row) * self.inner, first + row * stride


def _steps(size: int, stride: int, device: torch.device) -> Tensor:
    """Return `0, stride, 2 · stride, …`, `size` numbers, times `_GOLDEN`: int64, with overflow."""
    return torch.arange(size, dtype=torch.int64, device=device).mul_(_signed(stride * _GOLDEN))


def _mix(bits: Tensor, key: int | Tensor) -> None:
    """Replace `bits`, the indexes times `_GOLDEN` plus `key`, by 64 random bits for each."""
    _fold(bits, 30)
    bits *= _FIRST
    # The key again: else one key's numbers would be another key's at shifted indexes.
    bits ^= key
    _fold(bits, 27)
    bits *= _SECOND
    _fold(bits, 31)


def _fold(bits: Tensor, count: int) -> None:
    """Replace `bits` by `bits ^ bits >> count`, with a logical shift."""
    shifted = bits >> count
    shifted &= (1 << (64 - count)) - 1
    bits ^= shifted


def _signed(number: int) -> int:
    """Return `number` modulo 2^64 as a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63
