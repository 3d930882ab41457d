"""Whole documents packed into rows: what a batch of conversations is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.data.batches import NO_TARGET, InputsAndTargets, require_vocabulary
from plait.data.token_shards import Corpus


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The documents of a corpus in rows of `context` tokens: as many consecutive ones as fit, then padding.

    A document longer than `context` is cut at its end. In a row each document, and the padding, is apart.
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
    def _ends(self) -> NDArray[np.int64]:
        return self.corpus.document_ends()

    @cached_property
    def _begins(self) -> NDArray[np.int64]:
        return np.concatenate([[0], self._ends[:-1]])

    @cached_property
    def documents(self) -> range:
        """The documents that are taken."""
        return range(self.first, len(self._ends) if self.stop is None else self.stop)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each of these documents, before any is cut."""
        taken = slice(self.documents.start, self.documents.stop)
        return self._ends[taken] - self._begins[taken]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """The first document of each row, counted from `first`, and the number of documents."""
        total = np.concatenate([[0], np.cumsum(np.minimum(self.lengths, self.context))])
        firsts = [0]
        while firsts[-1] < len(self.lengths):
            firsts.append(int(np.searchsorted(total, total[firsts[-1]] + self.context, side="right")) - 1)
        return np.array(firsts, dtype=np.int64)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows) - 1

    @property
    def cut(self) -> int:
        """The number of documents that are longer than a row, and so are cut."""
        return int((self.lengths > self.context).sum())

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
            for document in range(int(self._rows[row]), int(self._rows[row + 1])):
                begin = int(self._begins[self.first + document])
                length = min(int(self.lengths[document]), self.context)
                read = self.corpus.read(begin, length).astype(np.int64)
                require_vocabulary(read, begin, self.vocab, self.source)
                answers = self.corpus.answers(begin, length)
                tokens[number, at : at + length], ids[number, at : at + length] = read, document
                following = read if answers is None else np.where(answers, read, NO_TARGET)
                targets[number, at : at + length - 1] = following[1:]
                at += length
        inputs = {"tokens": torch.from_numpy(tokens), "document_ids": torch.from_numpy(ids)}
        return inputs, torch.from_numpy(targets)
