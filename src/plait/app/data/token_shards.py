"""Prepared corpora: tokens in files, of which each access reads only its range, and the ends of documents.

A folder that `plait data prepare` has written:

    index.json               tokenizer, vocabulary, dtype, and per shard its tokens, documents and checksums
    preparation.json         sources and settings, by which a repeated command is recognised
    tokenizer/               copies of the tokenizer's files, but for bytes
    00000.tokens.bin         the tokens of the shard, one after another, little-endian
    00000.documents.bin      int64: the number of the shard's tokens up to the end of each document
    00000.answers.bin        of chats: a byte for each token, 1 where it belongs to an answer
    00000.first_answers.bin  of chats: uint32: the first token of each document that is to be predicted, or 0

A document may continue in the next shard. Each access reads what it needs from the files, so that a corpus of
any size opens in milliseconds, and takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.app.data.array_file import ArrayFile
from plait.app.data.corpus_manifest import INDEX, REMEDY, CorpusIndex, read_index, shard_arrays
from plait.app.data.tokenizer import Tokens
from plait.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Consecutive tokens of a corpus, with where documents end and which tokens belong to answers."""

    tokens: Tokens | ArrayFile
    ends: NDArray[np.int64] | ArrayFile | None
    """The number of its tokens up to the end of each document; None: documents are not kept apart."""
    answers: NDArray[np.uint8] | ArrayFile | None = None
    """1 where a token belongs to an answer; None: all are to be predicted."""
    first_answers: NDArray[np.uint32] | ArrayFile | None = None
    """The first token of each document that is to be predicted, or 0; None: token 1."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of one or more shards in their order, as one long sequence."""

    _shards: Sequence[TokenShard] = field(repr=False)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._starts[-1])

    @cached_property
    def has_documents(self) -> bool:
        """Whether the ends of documents are known."""
        return any(shard.ends is not None for shard in self._shards)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The number of tokens before each shard, and of all."""
        return np.concatenate([[0], np.cumsum([len(shard.tokens) for shard in self._shards], dtype=np.int64)])

    def read(self, first: int, count: int) -> Tokens:
        """Return `count` consecutive tokens as a new array, or a view within one shard."""
        parts = [shard.tokens[begin:end] for shard, begin, end in self._ranges(first, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    @cached_property
    def _document_starts(self) -> NDArray[np.int64]:
        """The number of documents that end before each shard, and of all."""
        counts = [1 if shard.ends is None else len(shard.ends) for shard in self._shards]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @property
    def document_count(self) -> int:
        """The number of documents; a shard whose documents are not kept apart is one."""
        return int(self._document_starts[-1])

    def document_ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the number of the corpus's tokens up to the end of each document `first` to `stop` - 1."""
        found = []
        for number, begin, end in _ranges(self._document_starts, first, stop):
            shard = self._shards[number]
            ends = np.array([len(shard.tokens)]) if shard.ends is None else shard.ends
            found.append(int(self._starts[number]) + ends[begin:end])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def first_answers(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the index of the first target token in each of documents `first` to `stop` - 1; 0: none."""
        found = []
        for number, begin, end in _ranges(self._document_starts, first, stop):
            known = self._shards[number].first_answers
            found.append(np.ones(end - begin, np.int64) if known is None else known[begin:end])
        return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)

    def answers(self, first: int, count: int) -> NDArray[np.bool_] | None:
        """Return for `count` consecutive tokens whether each belongs to an answer; None where all count."""
        parts = [
            shard.answers[begin:end]
            for shard, begin, end in self._ranges(first, count)
            if shard.answers is not None
        ]
        return np.concatenate(parts).astype(bool) if parts else None

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        """Return for `count` consecutive tokens how many documents end before each, counted from `first`.

        So a document is a run of equal numbers. Zeros where the ends of documents are not known.
        """
        found, before = [], 0
        for shard, begin, end in self._ranges(first, count):
            if (ends := shard.ends) is None:
                found.append(np.zeros(end - begin, dtype=np.int64))
                continue
            # A document that goes on from the shard before may end before the first token of this one.
            low = ends.searchsorted(begin, side="left" if found else "right")
            ends = ends[low : ends.searchsorted(end, side="right")]
            numbers = np.searchsorted(ends, np.arange(begin, end), side="right")
            found.append(numbers + before)
            before += len(ends)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document_length(self, first: int) -> int:
        """Return the number of tokens from `first` to its document's end, or to the corpus's if unknown."""
        length = 0
        for shard, begin, end in self._ranges(first, len(self) - first):
            ends = shard.ends
            at = 0 if ends is None else int(ends.searchsorted(begin, side="left" if length else "right"))
            if ends is not None and at < len(ends):
                return length + int(ends[at : at + 1][0]) - begin
            length += end - begin
        return length

    def _ranges(self, first: int, count: int) -> Iterator[tuple[TokenShard, int, int]]:
        """Yield the shards that hold some tokens, and the range of these tokens in each."""
        for number, begin, end in _ranges(self._starts, first, first + count):
            yield self._shards[number], begin, end


def _ranges(starts: NDArray[np.int64], first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the shards that hold the elements `first` … `stop`, and the range of these in each."""
    number = int(np.searchsorted(starts, first, side="right")) - 1
    while number < len(starts) - 1 and int(starts[number]) < stop:
        start, after = int(starts[number]), int(starts[number + 1])
        begin, end = max(first, start), min(stop, after)
        if begin < end or start == after:  # a document may end in a shard without tokens
            yield number, begin - start, end - start
        number += 1


def corpus_of(tokens: Tokens) -> Corpus:
    """Return one array as a corpus whose documents are not kept apart."""
    return Corpus([TokenShard(tokens, None)])


def open_corpus(folder: Path) -> tuple[Corpus, CorpusIndex]:
    """Return a corpus that `plait data prepare` has written, and its index. DataError for damaged files."""
    index, shards = read_index(folder), []
    for number, entry in enumerate(index.shards):
        arrays = shard_arrays(folder, number, entry, index.dtype, index.chats)
        for one in arrays:
            if not one.is_whole():
                raise DataError(
                    f"{one.path} is missing or has not the {one.count:,} elements that {INDEX} counts: "
                    f"{REMEDY}."
                )
        shards.append(TokenShard(*arrays))
    return Corpus(shards), index
