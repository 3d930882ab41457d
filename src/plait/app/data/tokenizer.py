"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.app.data.tokenizer_json import (
    SurroundingTokens,
    library_errors,
    open_reader,
    post_processed,
    token_name,
    tokenizer_config,
)
from plait.errors import ConfigError, hub_remedy

Tokens = NDArray[Any]  # one dim, of an unsigned integer type (a .npy file may hold a signed one)


class ByteTokenizer:
    """Tokenizer whose tokens are single bytes."""

    name = "bytes"
    """The name shown to the user."""
    vocab = 256
    """The number of different tokens."""

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the bytes of all documents, concatenated (uint8)."""
        return np.frombuffer(b"".join(documents), dtype=np.uint8)

    def encode_each(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text (uint8)."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def prompt(self, text: str) -> list[int]:
        """Return the bytes of a text, as tokens."""
        return list(text.encode())

    def surrounding(self, asked: str | None) -> SurroundingTokens:
        """Return no surrounding tokens. Raises ConfigError if an end token is asked for: bytes have none."""
        if asked:
            raise ConfigError(
                f"--end {asked!r}: bytes have no such token; give a tokenizer.json, or no --end."
            )
        return SurroundingTokens()

    def token(self, number: int) -> str:
        """Return the text of one token."""
        return self.decode([number])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the bytes as UTF-8 text, `�` for tokens above 255 and invalid sequences; none is special."""
        replacement = "�".encode()
        parts = [bytes([token]) if token < self.vocab else replacement for token in tokens]
        return b"".join(parts).decode(errors="replace")


class FileTokenizer:
    """Tokenizer from a Hugging Face `tokenizer.json`; needs the `tokenizers` extra."""

    def __init__(self, path: Path) -> None:
        given = str(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"data.tokenizer = {str(path)!r} is no file: "
                'give "bytes" or the path of a Hugging Face tokenizer.json, or of its folder'
                f"{hub_remedy(given)}."
            )
        self.reader: Any = open_reader(path)
        """The `tokenizers.Tokenizer`."""
        self.path, self.name = path, path.name
        self.vocab: int = max(self.reader.get_vocab().values(), default=-1) + 1
        """One above the largest number of a token, also where numbers below it are left out."""

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the tokens of all documents (uint32), with the tokenizer's special tokens around each."""
        around, texts = self.surrounding(None), [one.decode() for one in documents]
        parts = [around.complete(tokens) for tokens in self.encode_each(texts)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def encode_each(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text (uint32), without special tokens before or after it."""
        with library_errors(f"{self.path} cannot divide a text into tokens"):
            encodings = self.reader.encode_batch_fast(texts, add_special_tokens=False)
        # array reads a list three times as fast as NumPy does.
        return [np.array(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of `text` as the beginning of a document, which goes on."""
        (tokens,) = self.encode_each([text])
        return [*self.surrounding(None).opening(tokens), *tokens.tolist()]

    def surrounding(self, asked: str | None) -> SurroundingTokens:
        """Return the tokens to add around each document: its `post_processor`'s, and its end token.

        `asked`: the token after each document, instead; "" for none; None for the `eos_token` of a
        `tokenizer_config.json` beside the tokenizer, if there is one. Raises ConfigError for a token that the
        vocabulary does not have.
        """
        own = post_processed(self.reader, self.path)
        token = token_name(tokenizer_config(self.path), "eos_token") if asked is None else asked
        if not token:
            return own if asked is None else own._replace(after=())
        number: int | None = self.reader.token_to_id(token)
        if number is None:
            raise ConfigError(
                f"{token!r}, which is to end each document, is no token of {self.name}: give another one by "
                "--end, or --end '' for none."
            )
        return own.ending_with(number) if asked is None else own._replace(after=(number,))

    def unwritten_start(self) -> str:
        """Return the start token that `tokenizer_config.json` asks for but texts do not get, else ""."""
        config = tokenizer_config(self.path)
        token = token_name(config, "bos_token") or ""
        is_asked = config.get("add_bos_token") is True and token
        return (
            token if is_asked and self.reader.token_to_id(token) not in self.surrounding(None).before else ""
        )

    def token(self, number: int) -> str:
        """Return the name of one token, such as <|endoftext|>."""
        return str(self.reader.id_to_token(number))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, special ones if `special`, without tokens outside of the vocabulary."""
        known = [token for token in tokens if token < self.vocab]
        return str(self.reader.decode(known, skip_special_tokens=not special))


Tokenizer = ByteTokenizer | FileTokenizer


def printable(text: str) -> str:
    """Return `text` with control characters, except line ends and tabs, replaced by `�`."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer that `data.tokenizer` names. Raises ConfigError, and DataError for a broken file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())
