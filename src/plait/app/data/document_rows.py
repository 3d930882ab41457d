"""Whole documents packed into rows, as for batches of conversations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.app.data.batches import NO_TARGET, InputsAndTargets, require_vocabulary
from plait.app.data.token_shards import Corpus

APART = 16
"""Rows between two of which the first document is kept; that of the others is found again."""
DOCUMENTS_AT_ONCE = 1 << 16
"""Documents whose ends are read at once to divide them into rows."""


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The documents of a corpus in rows of `context` tokens: as many consecutive ones as fit, then padding.

    A document longer than `context` is cut at its end; one of which no token is to be predicted within it is
    left out, so that each row has a target. In a row each document, and the padding, is apart.
    Memory: 8 bytes for each `APART` rows.
    """

    corpus: Corpus
    context: int
    vocab: int
    source: str
    first: int = 0
    """The first document that is taken."""
    stop: int | None = None
    """The document after the last one; None: all are taken."""

    @cached_property
    def _division(self) -> _Division:
        stop = self.corpus.document_count if self.stop is None else self.stop
        return _divide(self.corpus, self.first, stop, self.context)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._division.rows

    @property
    def cut(self) -> int:
        """The number of documents that are longer than a row, and so are cut."""
        return self._division.cut

    @property
    def left_out(self) -> int:
        """The number of documents without a token that is to be predicted within `context`."""
        return self._division.left_out

    def take(self, rows: NDArray[Any]) -> InputsAndTargets:
        """Return the rows with these numbers, `[n]`: inputs `tokens` and `document_ids`, and targets.

        All are `[n, context]` int64. A target is the next token of the document, or -100: for the last token,
        for padding, and where the next token belongs to no answer. Raises `DataError` for a token beyond the
        vocabulary.
        """
        import torch  # late, as in `batches`

        shape = len(rows), self.context
        tokens, ids = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        targets = np.full(shape, NO_TARGET, dtype=np.int64)
        for number, row in enumerate(rows):
            at = 0
            for document, begin, ends in self._documents(int(row)):
                length = min(int(ends[-1]) - begin, self.context)
                read = self.corpus.read(begin, length).astype(np.int64)
                require_vocabulary(read, begin, self.vocab, self.source)
                answers = self.corpus.answers(begin, length)
                of = np.searchsorted(ends, np.arange(begin, begin + length), side="right")
                tokens[number, at : at + length] = read
                ids[number, at : at + length] = document - self.first + of
                counts = of[1:] == of[:-1]
                if answers is not None:
                    counts &= answers[1:]
                targets[number, at : at + max(0, length - 1)] = np.where(counts, read[1:], NO_TARGET)
                at += length
        inputs = {"tokens": torch.from_numpy(tokens), "document_ids": torch.from_numpy(ids)}
        return inputs, torch.from_numpy(targets)

    def _documents(self, row: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Yield runs of documents in a row: the first one, where it begins, and where each of them ends."""
        known, number = divmod(row, APART)
        first, stop = (int(one) for one in self._division.begins[known : known + 2])
        bounds = _bounds(self.corpus, first, stop)
        sizes = _sizes(self.corpus, first, bounds, self.context)
        begins = [*_row_begins(sizes, self.context, number + 2), stop - first]
        kept = begins[number] + np.flatnonzero(sizes[begins[number] : begins[number + 1]])
        for run in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
            begin, end = int(run[0]), int(run[-1]) + 1
            yield first + begin, int(bounds[begin]), bounds[begin + 1 : end + 1]


@dataclass(frozen=True)
class _Division:
    """The division of documents into rows."""

    begins: NDArray[np.int64]
    """The first document of each row whose number `APART` divides, and the document after the last one."""
    rows: int
    cut: int
    left_out: int


def _divide(corpus: Corpus, first: int, stop: int, context: int) -> _Division:
    """Divide the documents `first` … `stop` into rows, reading the ends of some at a time."""
    kept, rows, cut, left_out, seen, at_once = [], 0, 0, 0, first, DOCUMENTS_AT_ONCE
    while first < stop:
        end = min(first + at_once, stop)
        bounds = _bounds(corpus, first, end)
        sizes = _sizes(corpus, first, bounds, context)
        new, is_kept = slice(seen - first, None), sizes > 0
        cut += int((is_kept & (np.diff(bounds) > context))[new].sum())
        left_out += int((~is_kept)[new].sum())
        seen = end
        skipped = int(np.argmax(is_kept)) if is_kept.any() else end - first
        begins = [skipped + one for one in _row_begins(sizes[skipped:], context)]
        if end < stop and skipped < end - first:
            if len(begins) == 1:
                at_once *= 2
                continue
            *begins, last = begins  # which may go on with the documents behind
        else:
            last = end - first
        kept += [first + one for one in begins[-rows % APART :: APART]]
        rows += len(begins)
        first += last
    return _Division(np.array([*kept, stop], dtype=np.int64), rows, cut, left_out)


def _sizes(corpus: Corpus, first: int, bounds: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """Return the tokens that each of the documents from `first` on takes of a row; 0 where it is left out."""
    sizes = np.minimum(np.diff(bounds), context)
    answers = corpus.first_answers(first, first + len(sizes))
    return np.where((answers > 0) & (answers < sizes), sizes, 0)


def _bounds(corpus: Corpus, first: int, stop: int) -> NDArray[np.int64]:
    """Return where the documents `first` … `stop` begin in the corpus, and where the last one ends."""
    ends = corpus.document_ends(max(0, first - 1), stop)
    return ends if first else np.concatenate([[0], ends])


def _row_begins(sizes: NDArray[np.int64], context: int, at_most: int | None = None) -> list[int]:
    """Return the first document of each row, or of `at_most` rows, by the tokens that each document takes."""
    before = [0, *np.cumsum(sizes).tolist()]
    begins = [0] if len(sizes) else []
    while begins and (at_most is None or len(begins) < at_most):
        following = bisect_right(before, before[begins[-1]] + context, begins[-1]) - 1
        if following == len(sizes):
            break
        begins.append(following)
    return begins
