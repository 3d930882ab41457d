"""Batches of tokens, which depend only on the seed and the step, never on the layout.

A global batch is `batch` sequences, of which data-parallel rank `d` of `D` takes `rank_rows(d, D, batch)`.
Nothing is communicated and no state is kept: any batch of any step can be made directly, also after a resume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.app.data.token_shards import Corpus
from plait.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

InputsAndTargets: TypeAlias = "tuple[Tensor | dict[str, Tensor], Tensor]"

UInt64s = NDArray[np.uint64]
NO_TARGET = -100
"""The target of a token whose next one is not to be predicted."""
BLOCK = 1024
"""Rows among which each corpus has its share: a weight below half a row of a block counts as none."""
_ROUNDS = 6
"""Of the Feistel network in `permute`."""


def rank_rows(rank: int, ranks: int, batch: int) -> slice:
    """Return the rows of a global batch for data-parallel rank `rank`, an equal share, or raise DataError."""
    if batch % ranks:
        raise DataError(
            f"batches have {batch} rows, which {ranks} data-parallel ranks cannot share equally: "
            f"give batches of {max(1, batch // ranks) * ranks} rows, or change plan.dp."
        )
    share = batch // ranks
    return slice(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class TokenWindows:
    """The tokens of a corpus in windows of `context` + 1, which overlap by one: each token is a target once.

    Where the corpus keeps documents apart, a window holds parts of several, packed.
    """

    corpus: Corpus
    context: int
    vocab: int
    source: str
    start: int = 0
    """The first token of the corpus that is taken."""
    stop: int | None = None
    """The token after the last one; None: all are taken."""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return (len(self.corpus) if self.stop is None else self.stop) - self.start

    @property
    def count(self) -> int:
        """The number of windows."""
        return max(0, self.size - 1) // self.context

    @property
    def left(self) -> int:
        """The number of tokens at the end that fill no window."""
        return max(0, self.size - 1) % self.context

    def take(self, windows: NDArray[Any]) -> InputsAndTargets:
        """Return the windows with these numbers, `[rows]`, as inputs and targets `[rows, context]` int64.

        Where documents are kept apart, inputs are a dictionary of `tokens` and `document_ids`, and the last
        token of each document has no target (-100). Raises `DataError` when a token is beyond the vocabulary.
        """
        first, size = self.start + windows.astype(np.int64) * self.context, self.context + 1
        cut = np.stack([self.corpus.read(int(one), size) for one in first]).astype(np.int64)
        for one, tokens in zip(first, cut, strict=True):
            require_vocabulary(tokens, int(one), self.vocab, self.source)
        if not self.corpus.has_documents:
            return _inputs_and_targets(cut)
        return _inputs_and_targets(cut, np.stack([self.corpus.documents(int(one), size) for one in first]))

    def check(self, count: int) -> None:
        """Raise `DataError` where one of the first `count` tokens is outside of the vocabulary."""
        chunk = 1 << 22
        end = self.start + min(count, self.size)
        for begin in range(self.start, end, chunk):
            tokens = self.corpus.read(begin, min(chunk, end - begin))
            require_vocabulary(tokens, begin, self.vocab, self.source)


def require_vocabulary(tokens: NDArray[Any], first: int, vocab: int, source: str) -> None:
    """Raise `DataError` for a token beyond the vocabulary; `tokens` begin at position `first` of `source`."""
    if not tokens.size or (int(tokens.max()) < vocab and int(tokens.min()) >= 0):
        return
    at = int(np.argmax((tokens >= vocab) | (tokens < 0)))
    token = int(tokens[at])
    remedy = f"set model.vocab to at least {token + 1}" if token >= 0 else "write tokens from 0 on"
    raise DataError(
        f"data.source = {source!r} holds token {token} at position {first + at}, outside the vocabulary of "
        f"{vocab}: {remedy}, or use the tokenizer the model is meant for."
    )


class Rows(Protocol):
    """Protocol: numbered rows of inputs and targets, of which batches are made."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def take(self, rows: NDArray[Any], /) -> InputsAndTargets:
        """Return the rows with these numbers, `[n]`, as inputs and targets."""


class Batches(Protocol):
    """A numbered sequence of global batches; a `plait.Loader` is one.

    An attribute `rows`, if there is one, is the number of rows before any of them comes again: a validation
    takes each of these once. A method `describe()`, if there is one, returns JSON values that decide which
    samples a step has, such as a seed: a run resumes only with the same (see `description`).
    """

    @property
    def size(self) -> int:
        """The number of rows of a global batch."""

    def batch(self, step: int, rows: slice) -> tuple[Any, Any]:
        """Return the inputs and targets of `rows` of the global batch of `step`, counted from 0."""


def row_total(batches: Batches) -> int | None:
    """Return the number of rows of `batches`, their attribute `rows`; None for endless ones, without it."""
    total = getattr(batches, "rows", None)
    return total if isinstance(total, int) and not isinstance(total, bool) else None


def description(batches: Batches) -> dict[str, Any]:
    """Return the settings that determine the samples of each step, as JSON values."""
    described = {"size": batches.size, **getattr(batches, "describe", dict)()}
    read: dict[str, Any] = json.loads(json.dumps(described))
    return read


@dataclass(frozen=True, eq=False)
class ConcatenatedRows:
    """The rows of several corpora, one after another."""

    corpora: Sequence[Rows]

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(each.count for each in self.corpora)

    def take(self, rows: NDArray[Any]) -> InputsAndTargets:
        """Return the rows with the given numbers, of all corpora, as inputs and targets."""
        starts = np.cumsum([0, *(each.count for each in self.corpora)])
        corpus = np.searchsorted(starts, rows, side="right") - 1
        mine = [np.nonzero(corpus == index)[0] for index in range(len(self.corpora))]
        parts = [
            each.take(rows[one] - start)
            for each, one, start in zip(self.corpora, mine, starts[:-1], strict=True)
            if len(one)
        ]
        return joined(parts, np.concatenate(mine))


@dataclass(frozen=True)
class ShuffledBatches:
    """Training batches: each window once per epoch, in a different order in each epoch."""

    windows: Rows
    size: int
    seed: int

    @property
    def rows(self) -> int:
        """The number of rows of an epoch."""
        return self.windows.count

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the order of rows, as JSON values."""
        return {"seed": self.seed, "rows": self.windows.count}

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, counted from 0.

        The result is (inputs, targets), each `[rows, context]` int64; targets are the inputs' next tokens.
        """
        numbers = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        epoch, position = np.divmod(numbers, self.windows.count)
        return self.windows.take(permute(position, self.windows.count, self.seed, epoch))


@dataclass(frozen=True, eq=False)
class MixedBatches:
    """Training batches of rows of several corpora; each corpus goes through its own epochs.

    The rows of a run are taken in blocks, in which each corpus has its share of rows, in an order that the
    seed and the block give. So any batch can be made directly.
    """

    corpora: Sequence[Rows]
    weights: Sequence[float]
    """One for each, above 0; only their proportions count."""
    size: int
    seed: int

    @cached_property
    def shares(self) -> NDArray[np.int64]:
        """The number of rows from each corpus in every 1,024 rows (`BLOCK`), by its weight."""
        exact = np.array(self.weights) / sum(self.weights) * BLOCK
        shares = np.floor(exact).astype(np.int64)
        missing = BLOCK - int(shares.sum())
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
        return shares

    @property
    def rows(self) -> int:
        """The number of rows of the mixture that can be taken before rows of some corpus repeat."""
        pairs = zip(self.corpora, map(int, self.shares), strict=True)
        return min(BLOCK * each.count // share for each, share in pairs if share)

    def epochs(self, steps: int) -> list[float]:
        """Return how many times a run of `steps` steps takes the rows of each corpus."""
        pairs = zip(self.corpora, map(int, self.shares), strict=True)
        return [steps * self.size * share / BLOCK / each.count for each, share in pairs]

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the order of rows, as JSON values."""
        return {
            "seed": self.seed,
            "rows": [each.count for each in self.corpora],
            "weights": list(self.weights),
        }

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, counted from 0."""
        numbers = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        corpus, position = self._places(numbers)
        parts, order = [], []
        for index, each in enumerate(self.corpora):
            mine = np.nonzero(corpus == index)[0]
            if len(mine):
                epoch, within = np.divmod(position[mine], each.count)
                parts.append(each.take(permute(within, each.count, self.seed + index, epoch)))
                order.append(mine)
        return joined(parts, np.concatenate(order))

    def _places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus of each row of the run, and its position among the rows of that corpus."""
        block, within = np.divmod(numbers, BLOCK)
        place = permute(within, BLOCK, self.seed, block)
        starts = np.concatenate([[0], np.cumsum(self.shares)])
        corpus = np.searchsorted(starts, place, side="right") - 1
        return corpus, block * self.shares[corpus] + place - starts[corpus]


@dataclass(frozen=True)
class ValidationBatches:
    """Validation batches: each window once, or `limit` batches of windows that are evenly spaced."""

    windows: Rows
    size: int
    limit: int | None = None
    """The most batches; None: as many as hold all windows."""

    @property
    def rows(self) -> int:
        """The number of windows that are taken; the last batch may have fewer than `size` of them."""
        return min(self.windows.count, self.size * (self.limit or self.windows.count))

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the choice of rows, as JSON values."""
        return {"rows": self.windows.count, "taken": self.rows}

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return the inputs and targets of `rows` of a validation batch; the last batch may have fewer."""
        numbers = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        return self.windows.take(numbers[numbers < self.rows] * self.windows.count // self.rows)


@dataclass(frozen=True)
class RandomBatches:
    """Batches of uniformly drawn tokens, for benchmarks."""

    vocab: int
    context: int
    size: int
    seed: int
    stream: int = 0

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, counted from 0."""
        generator = np.random.default_rng((self.seed, self.stream, step))
        tokens = generator.integers(self.vocab, size=(self.size, self.context + 1), dtype=np.int64)
        return _inputs_and_targets(tokens[rows])


def joined(parts: Sequence[InputsAndTargets], order: NDArray[np.int64]) -> InputsAndTargets:
    """Return the rows of several batches as one batch: row `n` of all of them becomes row `order[n]`."""
    import torch  # late, as below

    places = torch.from_numpy(np.argsort(order))
    targets = torch.cat([part[1] for part in parts])[places]
    tokens = [one["tokens"] if isinstance(one, dict) else one for one, _ in parts]
    if not any(isinstance(one, dict) for one, _ in parts):
        return torch.cat(tokens)[places], targets
    # A row of a batch that does not keep documents apart is one document.
    ids = [one["document_ids"] if isinstance(one, dict) else torch.zeros_like(one) for one, _ in parts]
    return {"tokens": torch.cat(tokens)[places], "document_ids": torch.cat(ids)[places]}, targets


def _inputs_and_targets(
    windows: NDArray[np.int64], documents: NDArray[np.int64] | None = None
) -> InputsAndTargets:
    import torch  # late: a corpus is checked before the ranks start, without torch

    sequences = torch.from_numpy(windows)
    inputs, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
    if documents is None:
        return inputs, targets
    ids = torch.from_numpy(documents)
    # Not in place: of one row, inputs and targets are views of the same memory.
    targets = targets.masked_fill(ids[:, 1:] != ids[:, :-1], NO_TARGET)
    return {"tokens": inputs, "document_ids": ids[:, :-1].contiguous()}, targets


def permute(positions: NDArray[Any], count: int, seed: int, epoch: NDArray[Any]) -> NDArray[np.int64]:
    """Return elements `positions` (`[n]`) of a random permutation of 0 … `count` − 1, without storing it.

    `seed` and `epoch`, `[n]`, choose the permutation of each position. A Feistel network permutes the next
    power of four; a result of `count` or more is mapped again until it is below (cycle walking), which keeps
    the map one to one. Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    start = np.full(len(positions), seed % 2**64, dtype=np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64))
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        result[outside] = _network(result[outside], keys[outside], half)
        outside = result >= count
    return result.astype(np.int64)


def _network(values: UInt64s, keys: UInt64s, half: np.uint64) -> UInt64s:
    """Return `values`, numbers of 2 × `half` bits, mapped one to one by Feistel networks with `keys`."""
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(round_))) & mask)
    return (left << half) | right


def _mix(values: UInt64s) -> UInt64s:
    """Return a 64-bit hash of each value: the finalizer of the generator SplitMix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
