"""`write_shard`: tokenize some ranges of sources into one shard."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.app.data.corpus_index import SHOWN_NAMES, ShardEntry, shard_paths
from plait.app.data.document_sources import SourceRange
from plait.app.data.encoded_documents import EncodedPart, TextEncoding, encoded_documents
from plait.app.data.whole_files import whole_file, write_text
from plait.errors import DataError


def write_shard(
    folder: Path, number: int, ranges: Sequence[SourceRange], settings: TextEncoding
) -> ShardEntry:
    """Tokenize ranges of sources and write them as one shard; return its counts, which are written last."""
    ends, first_answers, counts = array("q"), array("I"), _Counts()
    with ExitStack() as files:
        writers = [
            files.enter_context(whole_file(path)) for path in shard_paths(folder, number, settings.chats)
        ]
        for part in encoded_documents(ranges, settings):
            writers[0].write(part.tokens.astype(settings.dtype).data)
            counts.add(part)
            _require_known(counts.largest, settings)
            if part.answers is not None:
                writers[2].write(part.answers.data)
                first_answers.append(first_answer(part.answers))
            if part.ends:
                ends.append(counts.tokens)
        writers[1].write(ends)
        if settings.chats:
            writers[3].write(first_answers)
    entry = counts.entry(len(ends), tuple(one.checksum for one in writers))
    write_text(counts_file(folder, number), json.dumps(asdict(entry)))
    return entry


def first_answer(answers: NDArray[np.bool_]) -> int:
    """Return the index of a conversation's first target token; 0 if it has none.

    The token 0 cannot be predicted, since nothing stands before it.
    """
    return int(np.argmax(answers[1:])) + 1 if answers[1:].any() else 0


def _require_known(largest: int, settings: TextEncoding) -> None:
    """Raise DataError for a token that the tokenizer's vocabulary does not have."""
    if largest >= settings.vocab:
        raise DataError(
            f"{settings.tokenizer} gives token {largest} to a text, and its tokenizer.json has the tokens up "
            f"to {settings.vocab - 1} only: save the tokenizer again by transformers' save_pretrained."
        )


class _Counts:
    """Accumulates the counts of a shard for `index.json`."""

    def __init__(self) -> None:
        self.tokens = self._left_out = self._answers = self._unanswered = 0
        self.largest = -1
        self._names: dict[str, dict[str, None]] = {"unread": {}, "unknown_roles": {}, "left_out_roles": {}}
        """In the order of the fields of `ShardEntry`."""

    def add(self, part: EncodedPart) -> None:
        """Count a part of a document."""
        self.tokens += len(part.tokens)
        self._left_out += part.left_out
        self.largest = max(self.largest, int(part.tokens.max(initial=0)))
        if part.answers is not None:
            self._answers += (found := int(part.answers.sum()))
            self._unanswered += not found
        for name, known in self._names.items():
            if len(known) < SHOWN_NAMES:
                known.update(dict.fromkeys(getattr(part, name)))

    def entry(self, documents: int, checksums: tuple[str, ...]) -> ShardEntry:
        """Return the counts of a shard in which some documents end, with the checksums of its files."""
        names = [tuple(known)[:SHOWN_NAMES] for known in self._names.values()]
        counts = self.tokens, documents, self._answers, self._unanswered, self._left_out, self.largest
        unread, unknown_roles, left_out_roles = names
        return ShardEntry(*counts, unread, unknown_roles, left_out_roles, checksums)


def counts_file(folder: Path, number: int) -> Path:
    """Return the path of the counts of a finished shard, which is there until all are finished."""
    return folder / f"{number:05}.counts.json"
