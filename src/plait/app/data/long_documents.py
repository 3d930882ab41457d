"""Tokens of documents too long to be tokenized at once: cut only where that changes no token.

A text is cut where its tokens up to some characters behind the cut are those of both parts, one after
another. Tokenizers that begin each text in their own way (by a space, say) are cut beside a space; those of
which no cut keeps the tokens see the whole document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from plait.app.data.tokenizer import Tokens
from plait.errors import DataError

Encode = Callable[[Sequence[str]], list[Tokens]]
"""The tokens of each of several texts."""
PART = 1 << 18
"""Characters that are tokenized at once."""
AHEAD = 1 << 12
"""Characters behind a cut whose tokens must not depend on what stands before it."""
LARGEST = 1 << 23
"""Characters of a document that is tokenized at once where it cannot be cut: about 1 GB of memory."""
_TRIED = 4
"""Places of each kind that are tried."""


class Cut(NamedTuple):
    """A place where a text can be cut without changing its tokens."""

    at: int
    tokens: int
    """The tokens of the text before it."""


def find_cut(encode: Encode, text: str, found: Sequence[Tokens], first: int, last: int) -> Cut | None:
    """Return a place between `first` and `last`, close to `last`, where `text` can be cut, if one is found.

    `found`: the tokens of the whole `text`, and of it from other characters on, all of which must agree.
    """
    for at in _places(text, first, last):
        (behind,) = encode([text[at:]])
        if len(behind) and all(_ends_with(tokens, behind) for tokens in found):
            return Cut(at, len(found[0]) - len(behind))
    return None


def _ends_with(tokens: Tokens, last: Tokens) -> bool:
    return len(tokens) >= len(last) and np.array_equal(tokens[len(tokens) - len(last) :], last)


def _places(text: str, first: int, last: int) -> Iterator[int]:
    """Yield the places to try for a cut: after line ends, before spaces, after spaces.

    Not within words, whose tokens may depend on how many letters or digits stand before.
    """
    found: list[list[int]] = [[], [], []]
    for at in range(last, max(first, 2), -1):
        before, left, right, behind = [*text[at - 2 : at + 2].ljust(4)]
        if left == "\n" and not before.isspace() and not right.isspace():
            found[0].append(at)
        elif right == " " and not left.isspace() and not behind.isspace():
            found[1].append(at)
        elif left == " " and not before.isspace() and not right.isspace():
            found[2].append(at)
        if all(len(one) >= _TRIED for one in found):
            break
    yield from (at for one in found for at in one[:_TRIED])


class DocumentEncoder:
    """Encodes one document that comes in parts: together the tokens are those of its whole text."""

    def __init__(self, encode: Encode, path: str) -> None:
        self._encode, self._path = encode, path
        self._held, self._wanted = "", PART + AHEAD

    def add(self, text: str) -> Iterator[Tokens]:
        """Take a part of the text; yield the tokens that what follows cannot change."""
        self._held += text
        while len(self._held) >= self._wanted:
            yield from self._first_tokens()

    def end(self, ahead: str = "") -> Tokens:
        """Return the other tokens, without those of `ahead`, which follows behind a cut."""
        if not ahead:
            return self._encode([self._held])[0] if self._held else np.empty(0, dtype=np.uint32)
        tokens, behind = self._encode([self._held + ahead, ahead])
        if not _ends_with(tokens, behind):
            raise DataError(
                f"{self._path} cannot be divided where a shard ends without other tokens: give a "
                "larger --shard."
            )
        return tokens[: len(tokens) - len(behind)]

    def _first_tokens(self) -> Iterator[Tokens]:
        text = self._held[: self._wanted]
        (tokens,) = self._encode([text])
        last = len(text) - AHEAD
        cut = find_cut(self._encode, text, [tokens], last // 2, last)
        if cut is not None:
            self._held, self._wanted = self._held[cut.at :], PART + AHEAD
            yield tokens[: cut.tokens]
        elif len(text) < LARGEST:
            self._wanted = min(2 * len(text), LARGEST)
        else:
            raise DataError(
                f"{self._path} has a document of more than {LARGEST >> 20} million characters, and its "
                "tokenizer gives other tokens wherever it is cut: divide it into documents, such as its "
                "lines (of `plait data prepare`: --lines)."
            )
