"""Whole documents in rows, and what a corpus of any size takes to be read: counted in bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.app.data import document_rows
from plait.app.data.batches import ShuffledBatches, TokenWindows
from plait.app.data.corpus_manifest import CorpusIndex, ShardEntry, shard_paths, write_index
from plait.app.data.document_rows import DocumentRows
from plait.app.data.token_shards import Corpus, TokenShard, open_corpus


def greedy(lengths: list[int], context: int, firsts: list[int]) -> list[list[int]]:
    """The documents of each row, one after another; those without a target have no place in one."""
    rows: list[list[int]] = []
    held = context + 1
    for number, length in enumerate(lengths):
        size = min(length, context)
        if not 0 < firsts[number] < size:
            continue
        if held + size > context:
            rows.append([])
            held = 0
        rows[-1].append(number)
        held += size
    return rows


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    context=st.integers(1, 8),
    shards=st.integers(1, 4),
    taken=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    at_once=st.integers(1, 20),
    apart=st.integers(1, 4),
    every=st.integers(1, 4),
)
@example(lengths=[3] * 40, context=6, shards=2, taken=(0, 0), at_once=7, apart=4, every=1)
@example(lengths=[3] * 40, context=6, shards=2, taken=(0, 0), at_once=7, apart=1, every=3)
def test_document_rows_are_those_of_adding_one_document_after_another(
    lengths: list[int],
    context: int,
    shards: int,
    taken: tuple[int, int],
    at_once: int,
    apart: int,
    every: int,
) -> None:
    """Of documents of which every few have an answer, and some of these too late."""
    first = min(taken[0], len(lengths) - 1)
    stop = max(first + 1, len(lengths) - taken[1])
    ends = np.cumsum(lengths)
    firsts = [0 if number % every else number % 5 + 1 for number in range(len(lengths))]
    made, parts = [], np.array_split(np.arange(len(lengths)), shards)
    for part in parts:
        begin = int(ends[part[0] - 1]) if len(part) and part[0] else 0
        of = ends[part] - begin
        answers = np.array([firsts[one] for one in part], dtype=np.uint32)
        tokens = np.arange(begin, begin + int(of[-1] if len(of) else 0))
        made.append(TokenShard(tokens, of, first_answers=answers))
    corpus = Corpus(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_rows, "DOCUMENTS_AT_ONCE", at_once)
        patch.setattr(document_rows, "APART", apart)
        rows = DocumentRows(corpus, context, 1000, "some", first=first, stop=stop)
        expected = greedy(lengths[first:stop], context, firsts[first:stop])
        assert rows.count == len(expected)
        inputs, _ = rows.take(np.arange(rows.count))
    held = [one for row in expected for one in row]
    assert rows.cut == sum(lengths[first + one] > context for one in held)
    assert rows.left_out == stop - first - len(held)
    for number, documents in enumerate(expected):
        expected_tokens = [
            token
            for one in documents
            for token in range(ends[first + one] - lengths[first + one], ends[first + one])
        ][:context]
        ids = [one for one in documents for _ in range(lengths[first + one])][:context]
        padding = context - len(expected_tokens)
        assert inputs["tokens"][number].tolist() == expected_tokens + [0] * padding  # type: ignore[index]
        assert inputs["document_ids"][number].tolist() == ids + [-1] * padding  # type: ignore[index]


def corpus_on_disk(folder: Path, shards: int, *, chats: bool) -> None:
    """Shards of a thousand documents of twenty tokens each."""
    folder.mkdir()
    for number in range(shards):
        paths = shard_paths(folder, number, chats)
        np.zeros(20_000, np.uint16).tofile(paths[0])
        np.arange(20, 20_001, 20).tofile(paths[1])
        if chats:
            np.ones(20_000, np.uint8).tofile(paths[2])
            np.ones(1000, np.uint32).tofile(paths[3])
    entries = (ShardEntry(20_000, 1000),) * shards
    write_index(folder, CorpusIndex("bytes", 256, "uint16", None, chats, entries))


@pytest.mark.parametrize("kind", [TokenWindows, DocumentRows])
def test_bytes_that_are_read_do_not_grow_with_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Nor the largest part that is in memory at once; rows of documents need each document's end once."""
    sizes: list[int] = []
    usual = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return usual(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(document_rows, "DOCUMENTS_AT_ONCE", 500)
    monkeypatch.setattr(np, "memmap", None)
    for shards in (3, 60):
        folder = tmp_path / str(shards)
        corpus_on_disk(folder, shards, chats=kind is DocumentRows)
        sizes.clear()
        corpus, _ = open_corpus(folder)
        assert not sizes, "opening reads the index only"
        rows = kind(corpus, 64, 256, "some")
        assert rows.count > 100
        assert sum(sizes) <= (12 * 1000 * shards * 1.02 if kind is DocumentRows else 0)
        assert max(sizes, default=0) <= 8 * 501
        sizes.clear()
        ShuffledBatches(rows, 4, seed=1).batch(7, slice(0, 4))
        # A row: tokens and answers, a search of 11 steps, ends and first answers of the documents near it.
        assert sum(sizes) <= 4 * (65 * 3 + 2 * 8 * 11 + 12 * (document_rows.APART * 3 + 2))


def test_the_division_into_rows_keeps_8_bytes_for_many_rows(tmp_path: Path) -> None:
    corpus_on_disk(tmp_path / "corpus", 10, chats=True)
    rows = DocumentRows(open_corpus(tmp_path / "corpus")[0], 20, 256, "some")
    assert rows.count == 10_000
    kept = sum(np.asarray(one).nbytes for one in vars(rows._division).values())
    assert kept <= 8 * (10_000 // document_rows.APART + 4)
