"""Tokenization of the documents in ranges of text files, JSON records and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plait.app.data.chat_encoder import ChatEncoder, EncodedPart
from plait.app.data.document_sources import SourceRange, TextPart, read_records, read_texts
from plait.app.data.text_files import PART
from plait.app.data.token_safe_cuts import DocumentEncoder
from plait.app.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from plait.app.data.tokenizer_json import SurroundingTokens
from plait.errors import DataError


@dataclass(frozen=True)
class TextEncoding:
    """The settings by which sources are encoded: tokenizer, surrounding tokens, vocabulary, dtype."""

    tokenizer: str
    """bytes, or the path of a `tokenizer.json`."""
    column: str
    before: tuple[int, ...]
    """The tokens before each document, unless its text begins with them."""
    after: tuple[int, ...]
    """The tokens after each document, unless its text ends with them."""
    vocab: int
    dtype: str
    chats: bool = False
    """Whether the sources hold conversations."""
    tokenizer_hash: str = ""
    """Of the content of the tokenizer's files."""


def encoded_documents(ranges: Sequence[SourceRange], settings: TextEncoding) -> Iterator[EncodedPart]:
    """Yield the tokens of each document in ranges of source files; of a long document in several parts."""
    if settings.chats:
        for one in ranges:
            yield from _encoded_chats(one, settings.tokenizer)
        return
    reader, around = _tokenizer(settings.tokenizer), SurroundingTokens(settings.before, settings.after)
    parts = ((one.path, part) for one in ranges for part in read_texts(one, settings.column))
    yield from _encoded_texts(parts, reader, around)


def _encoded_texts(
    parts: Iterable[tuple[str, TextPart]], reader: Tokenizer, around: SurroundingTokens
) -> Iterator[EncodedPart]:
    """Yield documents in tokens: short ones are encoded together, long ones part by part."""
    short: list[TextPart] = []
    held = 0
    long: _LongDocument | None = None
    for path, part in parts:
        is_short = part.begins and part.ends and len(part.text) <= PART
        if is_short:
            short.append(part)
            held += len(part.text)
        if not is_short or held >= PART:
            yield from _encoded_at_once(short, reader, around)
            short, held = [], 0
        if not is_short:
            long = long or _LongDocument(reader, around, path, part.begins)
            yield from long.add(part)
            long = None if part.ends or part.ahead else long
    yield from _encoded_at_once(short, reader, around)


def _encoded_at_once(
    parts: Sequence[TextPart], reader: Tokenizer, around: SurroundingTokens
) -> Iterator[EncodedPart]:
    """Yield whole documents in tokens, without those of less than two tokens."""
    texts = reader.encode_each([part.text for part in parts]) if parts else []
    for part, tokens in zip(parts, texts, strict=True):
        whole = around.complete(tokens)
        if len(whole) > 1:
            yield EncodedPart(whole, unread=part.unread)
        else:
            yield EncodedPart(whole[:0], ends=False, left_out=1)


class _LongDocument:
    """Encoder of a document that is too long to encode at once, or of a portion's part of it."""

    def __init__(self, reader: Tokenizer, around: SurroundingTokens, path: str, begins: bool) -> None:
        self._encoder, self._around, self._begins = DocumentEncoder(reader.encode_each, path), around, begins

    def add(self, part: TextPart) -> Iterator[EncodedPart]:
        """Take the next part of the text; yield the tokens that later text cannot change."""
        for begin in range(0, len(part.text), PART):
            for tokens in self._encoder.add(part.text[begin : begin + PART]):
                yield EncodedPart(self._opened(tokens), ends=False, unread=part.unread)
        if part.ends or part.ahead:
            tokens = self._encoder.end(part.ahead)
            after = self._around.closing(tokens) if part.ends else ()
            whole = np.concatenate([self._opened(tokens), np.array(after, tokens.dtype)])
            yield EncodedPart(whole, ends=part.ends)

    def _opened(self, tokens: Tokens) -> Tokens:
        """Return tokens, preceded by the document's opening tokens if they are its first."""
        before = self._around.opening(tokens) if self._begins else ()
        self._begins = False
        return np.concatenate([np.array(before, tokens.dtype), tokens])


def _encoded_chats(one: SourceRange, tokenizer: str) -> Iterator[EncodedPart]:
    """Yield the conversations of a range. Raises DataError, which names the place of one that is none."""
    encoder = _chat_encoder(tokenizer)
    for place, record in read_records(one, None):
        try:
            found = encoder.encode(record)
        except DataError as error:
            raise DataError(f"{place} {error}.") from None
        is_answered = found.answers is not None and found.answers.any()
        yield found._replace(unknown_roles=()) if is_answered else found


@lru_cache(maxsize=1)
def _chat_encoder(folder: str) -> ChatEncoder:
    """Return the encoder of conversations of a tokenizer folder, cached in each process."""
    return ChatEncoder(folder)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer at a path, cached in each process."""
    return open_tokenizer(name)
