"""Checksums of tensors: sums of their bytes as 64-bit words, which a flipped bit always changes.

A bit that flips at place `k` changes its word by 2^k or by -2^k. Neither is 0 modulo 2^64 for `k` from 0 to
63, so the sum modulo 2^64 differs. So does it for any change within one word. Changes of several words cancel
by chance only, once in 2^64 times where they are random. A sum reads memory once, as fast as memory is; words
that change places it does not notice.

A tensor of a few words is not added up: its words themselves are kept, which is faster. So are the bytes
before the first whole word of a larger tensor, and after the last.

    large   | bytes | word word word word word … | bytes |        small   | word word bytes |
                      └──────── sum ───────┘                                as they are
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BYTES = 8
SMALL_BYTES = 2**12
"""Tensors of at most so many bytes are kept as they are."""


class WordChecksums:
    """Computes checksums of a list of tensors, int64 numbers that change if any one bit flips."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Prepare views of `tensors`, all on one device."""
        self.bytes = sum(one.nbytes for one in tensors)
        """What `compute` reads."""
        self._sums: list[Tensor] = []
        """Views of the whole words of large tensors."""
        self._copied: list[Tensor] = []
        """Tensors with gaps, which are copied to be added up."""
        self._kept: list[Tensor] = []
        """Views of bytes that are kept, with zeros after each up to a whole word where there is none."""
        owners: tuple[list[int], list[int], list[int]] = ([], [], [])
        for number, tensor in enumerate(tensors):
            flat = flat_view(tensor.detach())
            if flat is None:
                self._copied.append(tensor.detach())
                owners[1].append(number)
                continue
            words, edges = _words_and_edges(flat)
            if words is not None:
                self._sums.append(words)
                owners[0].append(number)
            for edge in edges:
                missing = -len(edge) % WORD_BYTES
                self._kept += [edge, edge.new_zeros(missing)] if missing else [edge]
                owners[2].extend([number] * ((len(edge) + missing) // WORD_BYTES))
        self.owners = [*owners[0], *owners[1], *owners[2]]
        """For each number, the tensor that it belongs to, by its place."""

    def compute(self) -> Tensor:
        """Return the checksums, int64 `[numbers]`, on the tensors' device, which is not synchronised."""
        numbers = [words.sum() for words in self._sums] + [_sum_of_copy(one) for one in self._copied]
        parts = [torch.stack(numbers)] if numbers else []
        if self._kept:
            parts.append(torch.cat(self._kept).view(torch.int64))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a view `[elements]` of a tensor whose elements lie side by side in any order; None with gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    by_stride = tensor.permute(order)
    return by_stride.view(-1) if by_stride.is_contiguous() else None


def _words_and_edges(flat: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Return the whole words of a flat tensor as int64, and its other bytes; small ones have bytes only."""
    data = flat.view(torch.uint8)
    if len(data) <= SMALL_BYTES:
        return None, [data]
    first = -data.storage_offset() % WORD_BYTES
    last = first + (len(data) - first) // WORD_BYTES * WORD_BYTES
    return data[first:last].view(torch.int64), [edge for edge in (data[:first], data[last:]) if len(edge)]


def _sum_of_copy(tensor: Tensor) -> Tensor:
    """Return the sum of the words of a tensor with gaps."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    padding = data.new_zeros(-len(data) % WORD_BYTES)
    return torch.cat([data, padding]).view(torch.int64).sum()
