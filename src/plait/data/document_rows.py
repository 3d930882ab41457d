"""Whole documents packed into rows: what a batch of conversations is made of."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.data.batches import NO_TARGET, InputsAndTargets, require_vocabulary
from plait.data.token_shards import Corpus

APART = 16
"""Rows between two of which the first document is kept; that of the others is found again."""
DOCUMENTS_AT_ONCE = 1 << 16
"""Documents whose ends are read at once to divide them into rows."""


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The documents of a corpus in rows of `context` tokens: as many consecutive ones as fit, then padding.

    A document longer than `context` is cut at its end. In a row each document, and the padding, is apart.
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
            document, begin, ends = self._documents(int(row))
            length = min(int(ends[-1]) - begin, self.context)
            read = self.corpus.read(begin, length).astype(np.int64)
            require_vocabulary(read, begin, self.vocab, self.source)
            answers = self.corpus.answers(begin, length)
            of = np.searchsorted(ends, np.arange(begin, begin + length), side="right")
            tokens[number, :length], ids[number, :length] = read, document - self.first + of
            counts = of[1:] == of[:-1]
            if answers is not None:
                counts &= answers[1:]
            targets[number, : max(0, length - 1)] = np.where(counts, read[1:], NO_TARGET)
        inputs = {"tokens": torch.from_numpy(tokens), "document_ids": torch.from_numpy(ids)}
        return inputs, torch.from_numpy(targets)

    def _documents(self, row: int) -> tuple[int, int, NDArray[np.int64]]:
        """Return the first document of a row, where it begins in the corpus, and where its documents end."""
        known, number = divmod(row, APART)
        first, stop = (int(one) for one in self._division.begins[known : known + 2])
        bounds = _bounds(self.corpus, first, stop)
        begins = [*_row_begins(np.diff(bounds), self.context, number + 2), stop - first]
        begin, end = begins[number], begins[number + 1]
        return first + begin, int(bounds[begin]), bounds[begin + 1 : end + 1]


@dataclass(frozen=True)
class _Division:
    """How documents are divided into rows."""

    begins: NDArray[np.int64]
    """The first document of each row whose number `APART` divides, and the document after the last one."""
    rows: int
    cut: int


def _divide(corpus: Corpus, first: int, stop: int, context: int) -> _Division:
    """Divide the documents `first` … `stop` into rows, reading the ends of some at a time."""
    kept, rows, cut, seen, at_once = [], 0, 0, first, DOCUMENTS_AT_ONCE
    while first < stop:
        end = min(first + at_once, stop)
        lengths = np.diff(_bounds(corpus, first, end))
        cut += int((lengths[seen - first :] > context).sum())
        seen = end
        begins = _row_begins(lengths, context)
        if end < stop:
            if len(begins) == 1:
                at_once *= 2
                continue
            *begins, last = begins  # which may go on with the documents behind
        else:
            last = stop - first
        kept += [first + one for one in begins[-rows % APART :: APART]]
        rows += len(begins)
        first += last
    return _Division(np.array([*kept, stop], dtype=np.int64), rows, cut)


def _bounds(corpus: Corpus, first: int, stop: int) -> NDArray[np.int64]:
    """Return where the documents `first` … `stop` begin in the corpus, and where the last one ends."""
    before = corpus.document_ends(first - 1, stop) if first else corpus.document_ends(0, stop)
    return before if first else np.concatenate([[0], before])


def _row_begins(lengths: NDArray[np.int64], context: int, at_most: int | None = None) -> list[int]:
    """Return the first document of each row, or of the first `at_most` rows."""
    before = [0, *np.cumsum(np.minimum(lengths, context)).tolist()]
    begins = [0]
    while at_most is None or len(begins) < at_most:
        following = bisect_right(before, before[begins[-1]] + context, begins[-1]) - 1
        if following == len(lengths):
            break
        begins.append(following)
    return begins
