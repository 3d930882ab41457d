"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError, DataError

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

    def end_token(self, asked: str | None) -> None:
        """Return None: there is no token that ends a document. Raises ConfigError where one is asked for."""
        if asked:
            raise ConfigError(
                f"--end {asked!r}: bytes have no such token; give a tokenizer.json, or no --end."
            )

    def token(self, number: int) -> str:
        """Return the text of one token."""
        return self.decode([number])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the bytes as UTF-8 text, with `�` for tokens above 255 and invalid sequences.

        `special`: unused, since there are no special tokens.
        """
        replacement = "�".encode()
        parts = [bytes([token]) if token < self.vocab else replacement for token in tokens]
        return b"".join(parts).decode(errors="replace")


class FileTokenizer:
    """Tokenizer from a Hugging Face `tokenizer.json`; needs the `tokenizers` extra."""

    def __init__(self, path: Path) -> None:
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"data.tokenizer = {str(path)!r} is no file: "
                'give "bytes" or the path of a Hugging Face tokenizer.json, or of its folder.'
            )
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r} needs the package tokenizers: "
                "install it with pip install 'plait[tokenizers]'."
            ) from None
        try:
            self._reader = Reader.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer = {str(path)!r} is no tokenizer.json: {error}.") from None
        self.path, self.name = path, path.name
        self.vocab: int = self._reader.get_vocab_size()

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the tokens of all documents (uint32), without special tokens."""
        pieces = self.encode_each([document.decode() for document in documents])
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint32)

    def encode_each(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text (uint32), without special tokens."""
        encodings = self._reader.encode_batch_fast(texts, add_special_tokens=False)
        # array reads a list three times as fast as NumPy does.
        return [np.array(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]

    def end_token(self, asked: str | None) -> int | None:
        """Return the number of the token that ends a document.

        `asked`: the token; "" for none; None for that of a `tokenizer_config.json` beside the tokenizer, if
        there is one. Raises ConfigError for a token that the vocabulary does not have.
        """
        token = self._configured_end() if asked is None else asked
        if not token:
            return None
        number: int | None = self._reader.token_to_id(token)
        if number is None:
            raise ConfigError(
                f"{token!r}, which is to end each document, is no token of {self.name}: give another one by "
                "--end, or --end '' for none."
            )
        return number

    def _configured_end(self) -> str | None:
        try:
            token = json.loads((self.path.parent / "tokenizer_config.json").read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            return None
        return token.get("content") if isinstance(token, dict) else token

    def token(self, number: int) -> str:
        """Return the name of one token, such as <|endoftext|>."""
        return str(self._reader.id_to_token(number))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without tokens outside of the vocabulary.

        `special`: whether special tokens are shown.
        """
        known = [token for token in tokens if token < self.vocab]
        return str(self._reader.decode(known, skip_special_tokens=not special))

    def numbers(self) -> dict[str, int]:
        """Return the number of each token."""
        return dict(self._reader.get_vocab())


Tokenizer = ByteTokenizer | FileTokenizer


def printable(text: str) -> str:
    """Return `text` with control characters, except line ends and tabs, replaced by `�`."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer that `data.tokenizer` names.

    Raises `ConfigError` when there is no such file or its package is missing, `DataError` when it is broken.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())
