"""Prepared corpora: tokens in files that are read where they lie, with an index of where documents end.

A folder that `plait data prepare` has written:

    index.json               tokenizer, vocabulary, dtype, and per shard its tokens and documents
    preparation.json         sources and settings, by which a repeated command is recognised
    00000.tokens.bin         the tokens of the shard, one after another, little-endian
    00000.documents.npy      int64: the number of the shard's tokens up to the end of each document
    00000.answers.bin        of chats: a byte for each token, 1 where it belongs to an answer

A document may continue in the next shard. Files are memory-mapped when they are first read, so that a corpus
of any size opens in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.data.tokenizer import Tokens
from plait.errors import DataError

INDEX = "index.json"
SETTINGS = "preparation.json"
"""Sources and settings of the preparation, finished or not."""
FORMAT = 1


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index of a folder."""

    tokens: int
    documents: int
    """The number of documents that end in the shard."""
    answers: int = 0
    """Of chats: the number of tokens in answers."""
    unanswered: int = 0
    """Of chats: the number of conversations without any."""


@dataclass(frozen=True)
class CorpusIndex:
    """The contents of `index.json`."""

    tokenizer: str
    """Its file's name, or bytes."""
    vocab: int
    dtype: str
    """uint16 or uint32."""
    end: int | None
    """The token after each document, if any."""
    chats: bool
    """Whether the documents are conversations, whose answers are known."""
    shards: tuple[ShardEntry, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """The number of documents of all shards."""
        return sum(shard.documents for shard in self.shards)


class ShardFiles(NamedTuple):
    """The paths of a shard's files."""

    tokens: Path
    ends: Path
    answers: Path


def shard_files(folder: Path, number: int) -> ShardFiles:
    """Return the paths of a shard's files."""
    names = (f"{number:05}.{name}" for name in ("tokens.bin", "documents.npy", "answers.bin"))
    return ShardFiles(*(folder / name for name in names))


def write_index(folder: Path, index: CorpusIndex) -> None:
    """Write `index.json`, the last file of a preparation; a reader sees all of it or none."""
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps({"format": FORMAT, **asdict(index)}, indent=1))
    partial.replace(folder / INDEX)


def is_prepared(source: str) -> bool:
    """Return whether `data.source` names a folder that `plait data prepare` has written, or begun."""
    folder = Path(source).expanduser()
    return (folder / INDEX).is_file() or (folder / SETTINGS).is_file()


def read_index(folder: Path) -> CorpusIndex:
    """Read `index.json`. Raises DataError where it is missing or damaged."""
    path = folder / INDEX
    try:
        found = json.loads(path.read_text())
        shards = tuple(ShardEntry(**shard) for shard in found.pop("shards"))
        if found.pop("format") != FORMAT:
            raise DataError(f"{path} is of another version of plait: prepare the corpus again.")
        return CorpusIndex(**found, shards=shards)
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {INDEX}: give a folder that `plait data prepare` has finished."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{path} is damaged: prepare the corpus again, into another folder.") from None


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Consecutive tokens of a corpus."""

    tokens: Tokens
    ends: NDArray[np.int64] | None
    """The number of its tokens up to the end of each document; None: documents are not kept apart."""
    answers: NDArray[np.uint8] | None = None
    """1 where a token belongs to an answer; None: all are to be predicted."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of one or more shards in their order, as one long sequence."""

    sizes: tuple[int, ...]
    """The tokens of each shard."""
    has_documents: bool
    """Whether the ends of documents are known."""
    _shards: Sequence[TokenShard] = field(repr=False)
    """Opened when they are first read."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._starts[-1])

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def read(self, first: int, count: int) -> Tokens:
        """Return `count` consecutive tokens as a new array, or a view within one shard."""
        parts = [shard.tokens[begin:end] for shard, begin, end in self._pieces(first, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def document_ends(self) -> NDArray[np.int64]:
        """Return the number of tokens up to the end of each document, of the whole corpus."""
        found = [
            start + (np.array([size]) if shard.ends is None else shard.ends)
            for start, size, shard in zip(self._starts, self.sizes, self._shards, strict=False)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def answers(self, first: int, count: int) -> NDArray[np.bool_] | None:
        """Return for `count` consecutive tokens whether each belongs to an answer; None where all count."""
        parts = [
            shard.answers[begin:end]
            for shard, begin, end in self._pieces(first, count)
            if shard.answers is not None
        ]
        return np.concatenate(parts).astype(bool) if parts else None

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        """Return for `count` consecutive tokens the number of document ends before each, from `first` on.

        So a document is a run of equal numbers. Zeros where the ends of documents are not known.
        """
        found, before = [], 0
        for shard, begin, end in self._pieces(first, count):
            if shard.ends is None:
                found.append(np.zeros(end - begin, dtype=np.int64))
                continue
            # A document that goes on from the shard before may end before the first token of this one.
            low = np.searchsorted(shard.ends, begin, side="left" if found else "right")
            ends = shard.ends[low : np.searchsorted(shard.ends, end, side="right")]
            numbers = np.searchsorted(ends, np.arange(begin, end), side="right")
            found.append(numbers + before)
            before += len(ends)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document_length(self, first: int) -> int:
        """Return the number of tokens from `first` to the end of its document; to the last where unknown."""
        length = 0
        for shard, begin, end in self._pieces(first, len(self) - first):
            ends = np.empty(0, np.int64) if shard.ends is None else shard.ends
            at = int(np.searchsorted(ends, begin, side="left" if length else "right"))
            if at < len(ends):
                return length + int(ends[at]) - begin
            length += end - begin
        return length

    def _pieces(self, first: int, count: int) -> Iterator[tuple[TokenShard, int, int]]:
        """Yield the shards that hold some tokens, and the range of these tokens in each."""
        starts, stop = self._starts, first + count
        number = int(np.searchsorted(starts, first, side="right")) - 1
        while number < len(self.sizes) and int(starts[number]) < stop:
            begin, end = max(first, int(starts[number])), min(stop, int(starts[number + 1]))
            if begin < end or not self.sizes[number]:  # a document may end in a shard without tokens
                yield self._shards[number], begin - int(starts[number]), end - int(starts[number])
            number += 1


def corpus_of(tokens: Tokens) -> Corpus:
    """Return one array as a corpus whose documents are not kept apart."""
    return Corpus((len(tokens),), False, [TokenShard(tokens, None)])


def open_corpus(folder: Path) -> tuple[Corpus, CorpusIndex]:
    """Return the corpus that `plait data prepare` has written into `folder`, and its index.

    Raises DataError where files are missing, or have another size than the index says.
    """
    index = read_index(folder)
    itemsize = np.dtype(index.dtype).itemsize
    for number, shard in enumerate(index.shards):
        path = shard_files(folder, number).tokens
        if not path.is_file() or path.stat().st_size != shard.tokens * itemsize:
            raise DataError(
                f"{path} is missing or has not the {shard.tokens:,} tokens that {INDEX} counts: prepare the "
                "corpus again, into another folder."
            )
    sizes = tuple(shard.tokens for shard in index.shards)
    return Corpus(sizes, True, _ShardFiles(folder, index)), index


class _ShardFiles(Sequence[TokenShard]):
    """The shards of a folder, memory-mapped when they are first read."""

    def __init__(self, folder: Path, index: CorpusIndex) -> None:
        self._folder, self._index = folder, index
        self._open: dict[int, TokenShard] = {}

    def __len__(self) -> int:
        return len(self._index.shards)

    def __getitem__(self, number: Any) -> Any:
        """Return a shard."""
        if number not in self._open:
            paths, entry = shard_files(self._folder, number), self._index.shards[number]
            tokens = (
                np.memmap(paths.tokens, self._index.dtype, "r") if entry.tokens else np.empty(0, np.uint16)
            )
            answers = np.memmap(paths.answers, "u1", "r") if entry.tokens and self._index.chats else None
            self._open[number] = TokenShard(tokens, _open_ends(paths.ends, entry.documents), answers)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open files out: another process opens them again."""
        return {"_folder": self._folder, "_index": self._index, "_open": {}}


def _open_ends(path: Path, documents: int) -> NDArray[np.int64]:
    try:  # an empty file cannot be mapped
        ends = np.load(path, mmap_mode="r" if documents else None, allow_pickle=False)
    except (OSError, ValueError):
        ends = np.empty(0, dtype=bool)
    if ends.shape != (documents,) or ends.dtype != np.int64:
        raise DataError(
            f"{path} is missing or damaged: prepare the corpus again, into another folder."
        ) from None
    found: NDArray[np.int64] = ends
    return found
