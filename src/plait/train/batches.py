"""Which tokens make up which batch: a function of seed and step alone, never of the layout.

A global batch is `batch` sequences. Data-parallel rank `d` of `D` takes the rows `rows_of(d, D, batch)` of
it, so however many ranks there are, together they see the same rows. Nothing is communicated and nothing
is remembered: any batch of any step can be made at once, which is also what resuming needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError
from plait.train.permutation import permute
from plait.train.tokenizer import Tokens

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[Tensor, Tensor]


class Batches(Protocol):
    """A numbered sequence of global batches."""

    def batch(self, step: int, rows: slice) -> Pair:
        """Make `rows` of the global batch of `step`.

        Returns (inputs, targets), each `[rows, context]` int64; targets are the inputs' next tokens.
        """
        ...


def rows_of(rank: int, ranks: int, batch: int) -> slice:
    """Say which rows of a global batch the data-parallel rank takes; `ranks` divides `batch`."""
    share = batch // ranks
    return slice(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class Corpus:
    """Tokens cut into windows of `context` + 1 that overlap by one: each token is a target once.

    `start` is where these tokens begin in `source`; messages count from there.
    """

    tokens: Tokens
    context: int
    vocab: int
    source: str
    start: int = 0

    @property
    def windows(self) -> int:
        """How many windows there are."""
        return max(0, len(self.tokens) - 1) // self.context

    def take(self, windows: NDArray[Any]) -> Pair:
        """Cut these windows, `[rows]`, out as (inputs, targets), each `[rows, context]` int64.

        Raises `DataError` when a token is beyond the vocabulary.
        """
        first = windows.astype(np.int64) * self.context
        cut = self.tokens[first[:, None] + np.arange(self.context + 1)]
        if cut.size and (int(cut.max()) >= self.vocab or int(cut.min()) < 0):
            row, column = np.argwhere((cut >= self.vocab) | (cut < 0))[0]
            self._refuse(int(cut[row, column]), int(first[row]) + int(column))
        return _pair(cut)

    def check(self, count: int) -> None:
        """Look through the first `count` tokens for one beyond the vocabulary; raises `DataError`."""
        chunk = 1 << 22
        for begin in range(0, min(count, len(self.tokens)), chunk):
            part = self.tokens[begin : min(begin + chunk, count)]
            if int(part.max()) >= self.vocab or int(part.min()) < 0:
                offset = int(np.argmax((part >= self.vocab) | (part < 0)))
                self._refuse(int(part[offset]), begin + offset)

    def _refuse(self, token: int, position: int) -> None:
        remedy = f"set model.vocab to at least {token + 1}" if token >= 0 else "write tokens from 0 on"
        raise DataError(
            f"data.source = {self.source!r} holds token {token} at position {self.start + position}, "
            f"outside the vocabulary of {self.vocab}: {remedy}, or use the tokenizer the model is meant for."
        )


@dataclass(frozen=True)
class Shuffled:
    """Training batches: each window once an epoch, each epoch in another order."""

    corpus: Corpus
    size: int
    seed: int

    def batch(self, step: int, rows: slice) -> Pair:
        """Make `rows` of the global batch of `step`; see `Batches`."""
        place = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        epoch, position = np.divmod(place, self.corpus.windows)
        return self.corpus.take(permute(position, self.corpus.windows, self.seed, epoch))


@dataclass(frozen=True)
class Spread:
    """Validation batches: the same `size` × `count` windows every time, spread evenly over the corpus."""

    corpus: Corpus
    size: int
    count: int

    def batch(self, step: int, rows: slice) -> Pair:
        """Make `rows` of the validation batch number `step` < `count`; see `Batches`."""
        place = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        return self.corpus.take(place * self.corpus.windows // (self.size * self.count))


@dataclass(frozen=True)
class Uniform:
    """Uniformly drawn tokens, for benchmarks: no corpus at all."""

    vocab: int
    context: int
    size: int
    seed: int
    stream: int = 0

    def batch(self, step: int, rows: slice) -> Pair:
        """Make `rows` of the global batch of `step`; see `Batches`."""
        generator = np.random.default_rng((self.seed, self.stream, step))
        drawn = generator.integers(self.vocab, size=(self.size, self.context + 1), dtype=np.int64)
        return _pair(drawn[rows])


def _pair(windows: NDArray[Any]) -> Pair:
    import torch  # here, so that checking a corpus before the ranks start need not wait for torch

    sequences = torch.from_numpy(windows.astype(np.int64))
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
