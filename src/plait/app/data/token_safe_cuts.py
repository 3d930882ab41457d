"""Divides text into parts that can be tokenized independently: the tokens together are the whole text's.

A text is cut where its tokens up to some characters behind the cut are those of both parts, one after
another. Tokenizers that begin each text in their own way (by a space, say) are cut beside a space; those of
which no cut keeps the tokens see the whole document. Files are cut into ranges of bytes in this way,
documents that are too long to be tokenized at once into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from plait.app.data.text_files import AHEAD, PART, decoded, open_file, whole_characters
from plait.app.data.tokenizer import Tokens
from plait.errors import DataError

Encode = Callable[[Sequence[str]], list[Tokens]]
"""The tokens of each of several texts."""
LARGEST = 1 << 23
"""Characters of a document that is tokenized at once where it cannot be cut: about 1 GB of memory."""
_TRIED = 4
"""Places of each kind that are tried."""
_LONGEST_LINE = 1 << 20
"""Bytes in which a line end is looked for, to cut a text."""
_WINDOW = 12 * AHEAD
"""Bytes that are tokenized to find where to cut."""
_WINDOWS = 8
"""Windows in which a cut is looked for, before the range is made longer."""
_SHIFTS = (0, 1, 2, 3, 5, 7)
"""Where a window is tokenized from: it may begin within a number, whose digits are taken in threes."""


def text_cuts(path: str, size: int, total: int, encode: Encode | None) -> Iterator[int]:
    """Yield the byte offsets at which a text of `total` bytes is cut into ranges of about `size` bytes.

    `encode`: of the tokenizer, whose tokens no cut may change; None: of bytes, of which no cut does.
    """
    begin = 0
    with open_file(path) as file:
        while begin + size < total:
            for at in range(begin + size, total, size):
                cut = _token_cut(file, path, at, total, encode) if encode else _line_cut(file, at, total)
                if cut is not None:
                    break
            if cut is None or cut >= total:
                break
            yield (begin := cut)
    yield total


def _line_cut(file: BinaryIO, at: int, total: int) -> int:
    """Return where to cut a text near byte `at`: after the next line end, else between two characters."""
    file.seek(at - 1)
    line = file.readline(_LONGEST_LINE)
    if line.endswith(b"\n") or at - 1 + len(line) == total:
        return at - 1 + len(line)
    while at < total and (line[1] & 0xC0) == 0x80:  # within a character of several bytes
        at, line = at + 1, line[1:]
    return at


def _token_cut(file: BinaryIO, path: str, at: int, total: int, encode: Encode) -> int | None:
    """Return where to cut a text behind byte `at` without other tokens; None where no such place is near."""
    for window in range(_WINDOWS):
        start = max(0, at - 2 * AHEAD) + window * _WINDOW // 2
        file.seek(start)
        data = file.read(_WINDOW)
        if start + len(data) >= total:
            return None
        skipped = next((number for number in range(4) if (data[number] & 0xC0) != 0x80), 0)
        data = data[skipped : skipped + whole_characters(data[skipped:])]
        text = decoded(data, path, start + skipped)
        first = len(data[: max(0, at - start - skipped)].decode(errors="ignore")) + 1
        found = encode([text[shift:] for shift in _SHIFTS if shift < first])
        cut = find_cut(encode, text, found, first, len(text) - AHEAD)
        if cut is not None:
            return start + skipped + len(text[: cut.at].encode())
    return None


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
    """Yield the places to try for a cut: after line ends, before and after spaces; not within words."""
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
    """Tokenizes a document that is given in parts, to the same tokens as its whole text."""

    def __init__(self, encode: Encode, path: str) -> None:
        self._encode, self._path = encode, path
        self._held, self._wanted = "", PART + AHEAD

    def add(self, text: str) -> Iterator[Tokens]:
        """Take the next part of the text; yield the tokens that later text cannot change."""
        self._held += text
        while len(self._held) >= self._wanted:
            yield from self._first_tokens()

    def end(self, ahead: str = "") -> Tokens:
        """Return the remaining tokens, without those of `ahead`, the text that follows a cut.

        Raises DataError where a cut there would change the tokens.
        """
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
