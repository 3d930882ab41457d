"""The documents of the tokens that a router is given, and which tokens are padding.

A router's tokens are the positions of a micro-batch's rows, row by row. Padding are the positions whose
document id is negative, as those behind the last document of a packed row: no loss counts what they are, and
no expert computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.ranks.accelerator import sent
from plait.tensor.dropout import LocatePart
from plait.tensor.nested_values import Value, tensors_of
from plait.tensor.running_sequence import DocumentBounds, LocalSequence, running_sequence


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """The documents of a micro-batch, and which of their tokens this rank has.

    Without document ids each row is one document, without padding.
    """

    rows: int
    length: int
    """Positions of each row that this rank has, along `cp`."""
    sequence: LocalSequence | None
    """None where they are whole sequences, and each row is one document."""

    @staticmethod
    def of(inputs: Value, sequence: LocalSequence | None) -> TokenDocuments:
        """Return the documents of a micro-batch, whose model inputs are `inputs`.

        Dim 0 of their first tensor is the rows; dim 1 the positions, unless it is the last dim, of features.
        """
        shape, has_features = torch.Size([1]), False
        for tensor in tensors_of(inputs):
            shape, has_features = tensor.shape or shape, tensor.is_floating_point()
            break
        positions = len(shape) > 1 + has_features
        return TokenDocuments(shape[0], shape[1] if positions else 1, sequence)

    @property
    def count(self) -> int:
        """The number of documents of all rows, also those of which this rank has no token, and padding."""
        return len(self.sizes)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of tokens of each whole document, 0 of padding: int64 `[D]`, on the CPU."""
        bounds = self._bounds
        if bounds is None:
            length = self.length if self.sequence is None else self.sequence.layout.length
            return torch.full((self.rows,), length)
        sizes = [b - a for row in bounds.starts for a, b in pairwise((*row, bounds.length))]
        for number in _padded(bounds):
            sizes[number] = 0
        return torch.tensor(sizes, dtype=torch.int64)

    @cached_property
    def counted(self) -> int:
        """The number of this rank's tokens, along `cp`, that are no padding."""
        if self._bounds is None or not self._bounds.padding:
            return self.rows * self.length
        return int((self._numbers(slice(None)) < self.count).sum())

    def numbers(self, part: slice, device: torch.device) -> Tensor:
        """Return the number of each token's document, `count` for padding: int64 `[T]`.

        `part`: the positions, among this rank's of a row, that the router is given.
        """
        key = "token documents", part.start, part.stop, device
        compute = partial(self._numbers, part)
        if self.sequence is None:
            return sent(compute(), device)
        return self.sequence.result(key, lambda: sent(compute(), device))

    @property
    def positions(self) -> Tensor:
        """The positions of this rank of `cp` in the whole sequence, alike in all rows: int64, on the CPU."""
        return torch.arange(self.length) if self.sequence is None else self.sequence.indices

    @property
    def _bounds(self) -> DocumentBounds | None:
        return None if self.sequence is None else self.sequence.documents

    def _numbers(self, part: slice) -> Tensor:
        bounds = self._bounds
        if bounds is None:
            return torch.arange(self.rows).repeat_interleave(len(range(self.length)[part]))
        assert self.sequence is not None
        whole = torch.from_numpy(_by_position(bounds, self.count))
        return whole.index_select(1, self.sequence.indices[part]).flatten()


def has_padding() -> bool:
    """Return whether documents of the running sequence are padding."""
    sequence = running_sequence()
    return sequence is not None and sequence.documents is not None and bool(sequence.documents.padding)


def without_padding(indices: Tensor, locate: LocatePart | None) -> Tensor:
    """Return `indices`, the experts of tokens `[T, k]`, with -1 (none) for tokens that are padding.

    The tokens are those of the running sequence. `locate`: returns which part of its positions this rank has,
    given their number; None: all of them.
    """
    sequence = running_sequence()
    if sequence is None or sequence.documents is None or not has_padding() or indices.is_meta:
        return indices
    rows = len(sequence.documents.starts)
    length = len(indices) // max(rows, 1)
    first = 0 if locate is None else locate(length).start
    part = slice(first, first + length)

    def padding() -> Tensor:
        documents = TokenDocuments(rows, sequence.size, sequence)
        return documents.numbers(part, indices.device) == documents.count

    found = sequence.result(("padding of tokens", first, length, indices.device), padding)
    return indices.masked_fill(found[:, None], -1)


def _padded(bounds: DocumentBounds) -> list[int]:
    """Return the numbers of the documents, counted over all rows, that are padding."""
    firsts = np.cumsum([0, *map(len, bounds.starts)])
    return [int(first) + one for first, row in zip(firsts, bounds.padding, strict=False) for one in row]


def _by_position(bounds: DocumentBounds, count: int) -> NDArray[np.int64]:
    """Return the number of each position's document, `count` for padding: `[rows, length]`."""
    numbers = np.arange(count)
    numbers[_padded(bounds)] = count
    sizes = [b - a for row in bounds.starts for a, b in pairwise((*row, bounds.length))]
    return np.repeat(numbers, sizes).reshape(len(bounds.starts), bounds.length)
