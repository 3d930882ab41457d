"""Long documents are cut only where that changes no token: with encodings made up for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from plait.app.data import text_files
from plait.app.data import token_safe_cuts as text_cuts_module
from plait.app.data.text_files import text_ahead
from plait.app.data.token_safe_cuts import Cut, DocumentEncoder, find_cut, text_cuts
from plait.app.data.tokenizer import Tokens
from plait.errors import DataError


def letters(texts: Sequence[str]) -> list[Tokens]:
    return [np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) for text in texts]


def behind_a_mark(texts: Sequence[str]) -> list[Tokens]:
    """As encodings that begin each text in their own way: no cut keeps the tokens."""
    return letters([f"^{text}" for text in texts])


def words(texts: Sequence[str]) -> list[Tokens]:
    """A token a word, with the space before it; the whole word counts."""
    return [
        np.array([crc32(word.encode()) for word in text.replace(" ", "_ ").split("_")], dtype=np.uint32)
        for text in texts
    ]


CUTS = [
    ("one two\nthree four", 2, 17, 8),
    ("one two\nthree\nfour", 2, 17, 14),
    ("one two\nthree\nfour", 2, 13, 8),
    ("one two\n\nthree four", 2, 17, 14),
    ("one two three", 2, 12, 7),
    ("one two three", 3, 6, 4),
    ("one two three", 4, 6, None),
    ("one  two  three", 2, 12, None),
    ("onetwothree", 2, 10, None),
]
"""Texts, and of each the range in which it may be cut, and where it is."""


def test_a_cut_is_after_a_line_end_else_before_a_space_else_behind_one() -> None:
    for text, first, last, at in CUTS:
        found = letters([text, text[1:]])
        expected = None if at is None else Cut(at, at)
        assert find_cut(letters, text, found, first, last) == expected, text
        assert find_cut(behind_a_mark, text, behind_a_mark([text]), first, last) is None
        unlike = [*found, letters([text[:-1]])[0]]
        assert find_cut(letters, text, unlike, first, last) is None, "all agree"


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_the_parts_of_a_document_have_its_tokens(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    for module in (text_cuts_module, text_files):
        monkeypatch.setattr(module, "PART", 60)
        monkeypatch.setattr(module, "AHEAD", 20)
    text = "a few words\nof a line " * 20
    for encode in (letters, words):
        encoder, parts = DocumentEncoder(encode, "a.txt"), []
        for begin in range(0, len(text), part):
            parts += encoder.add(text[begin : begin + part])
        longest = 0 if not parts else max(map(len, parts))
        parts.append(encoder.end())
        assert np.concatenate(parts).tolist() == encode([text])[0].tolist()
        if encode is letters:
            assert longest <= 60, "what stands behind a cut is seen before it"
            assert all(len(one) > 30 for one in parts[:-1])
            assert 20 <= len(parts[-1]) < 80
    encoder = DocumentEncoder(letters, "a.txt")
    assert [*encoder.add("abc")] == []
    assert encoder.end("def").tolist() == letters(["abc"])[0].tolist()
    assert DocumentEncoder(letters, "a.txt").end().tolist() == []
    encoder = DocumentEncoder(behind_a_mark, "a.txt")
    assert not [*encoder.add("abc")]
    with pytest.raises(DataError, match=r"a\.txt cannot be divided where a shard ends without other tokens"):
        encoder.end("def")


def test_a_document_that_cannot_be_cut_is_encoded_at_once_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def counted(texts: Sequence[str]) -> list[Tokens]:
        sizes.extend(map(len, texts))
        return behind_a_mark(texts)

    for name, value in {"PART": 60, "AHEAD": 20, "LARGEST": 200}.items():
        monkeypatch.setattr(text_cuts_module, name, value)
    encoder = DocumentEncoder(counted, "a.txt")
    assert [*encoder.add("a" * 199)] == []
    assert sizes == [80, 160]
    assert encoder.end().tolist() == behind_a_mark(["a" * 199])[0].tolist()
    with pytest.raises(DataError, match=r"a\.txt has a document of more than .*: divide it into documents"):
        [*encoder.add("a")]


@pytest.mark.parametrize("size", [50, 200])
def test_a_file_is_cut_where_no_token_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for module in (text_cuts_module, text_files):
        monkeypatch.setattr(module, "AHEAD", 8)
    monkeypatch.setattr(text_cuts_module, "_WINDOW", 96)
    path, text = tmp_path / "a.txt", "ein Wörtchen, 漢字🙂\nnoch eins " * 30
    path.write_text(text)
    data = text.encode()
    cuts = [*text_cuts(str(path), size, len(data), letters)]
    assert cuts[-1] == len(data)
    for begin, cut in pairwise([0, *cuts[:-1]]):
        assert size < cut - begin <= size + 96
        assert data[cut - 1 : cut] == b"\n", "the last line end of the window"
        part = data[:cut].decode()
        assert text_ahead(str(path), cut) == text[len(part) : len(part) + 8]
    assert len(data) - (cuts[-2] if len(cuts) > 1 else 0) <= size + 96
    assert [*text_cuts(str(path), size, len(data), behind_a_mark)] == [len(data)]
    assert [*text_cuts(str(path), len(data), len(data), letters)] == [len(data)]
    path.write_text("a line of 11\n")
    assert [*text_cuts(str(path), 5, 13, None)] == [13], "no empty range behind the last line end"
