"""`write_shard`: tokenize some ranges of sources into one shard."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.data.chats import FIELDS, ChatEncoder, unknown_roles
from plait.data.document_sources import PIECE, SourceRange, TextPiece, read_pieces, read_records
from plait.data.token_shards import SHOWN_ROLES, ShardEntry, shard_files
from plait.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from plait.errors import DataError


@dataclass(frozen=True)
class TextEncoding:
    """How text becomes tokens."""

    tokenizer: str
    """bytes, or the path of a `tokenizer.json`."""
    column: str
    end: int | None
    """The token that is written after each document."""
    dtype: str
    chats: bool = False
    """Whether the sources hold conversations."""


def write_shard(
    folder: Path, number: int, ranges: Sequence[SourceRange], settings: TextEncoding
) -> ShardEntry:
    """Tokenize ranges of sources and write them as one shard; return its counts, which are written last."""
    dtype = settings.dtype
    paths = shard_files(folder, number)
    ends = array("q")
    total = answers = unanswered = 0
    roles: dict[str, None] = {}
    with partial_path(paths.tokens).open("wb") as file, partial_path(paths.answers).open("wb") as marks:
        for piece in _encoded(ranges, settings):
            file.write(piece.tokens.astype(dtype).data)
            total += len(piece.tokens)
            if piece.answers is not None:
                marks.write(piece.answers.data)
                answers += (found := int(piece.answers.sum()))
                unanswered += not found
                roles |= {} if found else dict.fromkeys(piece.unknown_roles)
            if piece.ends:
                ends.append(total)
    with partial_path(paths.ends).open("wb") as file:
        ends.tofile(file)
    for path in (paths.tokens, paths.ends, *([paths.answers] if settings.chats else [])):
        partial_path(path).replace(path)
    partial_path(paths.answers).unlink(missing_ok=True)
    entry = ShardEntry(total, len(ends), answers, unanswered, tuple(roles)[:SHOWN_ROLES])
    write_text(counts_file(folder, number), json.dumps(asdict(entry)))
    return entry


class _EncodedPiece(NamedTuple):
    """Tokens of one document, or of a part of it."""

    tokens: Tokens
    answers: NDArray[np.bool_] | None
    """Whether each is part of an answer; None but for chats."""
    ends: bool
    """Whether the document ends with them."""
    unknown_roles: tuple[str, ...] = ()
    """Of a conversation."""


def _encoded(ranges: Sequence[SourceRange], settings: TextEncoding) -> Iterator[_EncodedPiece]:
    """Yield the documents of some ranges in tokens."""
    if settings.chats:
        for one in ranges:
            yield from _encoded_chats(one, settings.tokenizer)
        return
    reader = _tokenizer(settings.tokenizer)
    end = np.array([] if settings.end is None else [settings.end], dtype=settings.dtype)
    for pieces in _batches(ranges, settings.column):
        encoded = reader.encode_each([piece.text for piece in pieces])
        for piece, tokens in zip(pieces, encoded, strict=True):
            yield _EncodedPiece(np.concatenate([tokens, end]) if piece.ends else tokens, None, piece.ends)


def _encoded_chats(one: SourceRange, tokenizer: str) -> Iterator[_EncodedPiece]:
    """Yield the conversations of a range. Raises DataError, which names the place of one that is none."""
    encoder = _chat_encoder(tokenizer)
    for place, record in read_records(one, FIELDS):
        try:
            yield _EncodedPiece(*encoder.encode(record), True, unknown_roles(record))
        except DataError as error:
            raise DataError(f"{one.path} has a conversation {place} that {error}.") from None


@lru_cache(maxsize=1)
def _chat_encoder(folder: str) -> ChatEncoder:
    """Return the tokenizer and chat template of a folder, which a process opens once."""
    return ChatEncoder(folder)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer, which a process opens once."""
    return open_tokenizer(name)


def _batches(ranges: Sequence[SourceRange], column: str) -> Iterator[list[TextPiece]]:
    """Yield lists of pieces of about `PIECE` characters together."""
    batch: list[TextPiece] = []
    held = 0
    for piece in chain.from_iterable(read_pieces(one, column) for one in ranges):
        batch.append(piece)
        held += len(piece.text)
        if held >= PIECE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def counts_file(folder: Path, number: int) -> Path:
    """Return the path of the counts of a finished shard, which is there until all are finished."""
    return folder / f"{number:05}.counts.json"


def partial_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f"{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees all of it or no file."""
    partial_path(path).write_text(text)
    partial_path(path).replace(path)
