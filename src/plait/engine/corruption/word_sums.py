"""The sum of a tensor's bytes as 64-bit words, which a flipped bit always changes.

A bit that flips at place `k` changes its word by 2^k or by -2^k. Neither is 0 modulo 2^64 for `k` from 0 to
63, so the sum modulo 2^64 differs. So does it for any change within one word. Changes of several words cancel
by chance only, once in 2^64 times where they are random. A sum reads memory once, as fast as memory is; words
that change places it does not notice.

Bytes before the first whole word of a storage, and after the last, are added as numbers of 8 bits: a flip
changes these by 2^k, too, with `k` below 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BYTES = 8


class WordSum:
    """Computes the sum of a tensor's words, again and again, as long as its memory stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._address = tensor.data_ptr()
        flat = flat_view(self._tensor)
        self._parts = None if flat is None else _parts(flat)
        """Views of the tensor's memory: whole words, then bytes; None where it has gaps, and is copied."""

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` still lies in the memory that is summed."""
        return tensor.data_ptr() == self._address and tensor.shape == self._tensor.shape

    def compute(self) -> Tensor:
        """Return the sum: int64, 0-d, on the tensor's device, which is not synchronised."""
        parts = self._parts
        if parts is None:
            parts = _parts(self._tensor.reshape(-1))
        total = parts[0].sum()
        for part in parts[1:]:
            total = total + part.sum()
        return total


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a view `[elements]` of a tensor whose elements lie side by side in any order; None with gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    by_stride = tensor.permute(order)
    return by_stride.view(-1) if by_stride.is_contiguous() else None


def _parts(flat: Tensor) -> Sequence[Tensor]:
    """Return the whole words of a flat tensor as int64, and the bytes before and after them, if any."""
    data = flat.view(torch.uint8)
    before = min(-data.storage_offset() % WORD_BYTES, len(data))
    words = (len(data) - before) // WORD_BYTES * WORD_BYTES
    parts = [data[before : before + words].view(torch.int64), data[:before], data[before + words :]]
    return [part for part in parts if len(part)] or [parts[0]]
