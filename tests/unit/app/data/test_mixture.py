"""Mixtures of corpora, and batches that are read ahead."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.app.data.batches import (
    BLOCK,
    ConcatenatedRows,
    MixedBatches,
    RandomBatches,
    description,
    row_total,
)
from plait.app.data.document_rows import DocumentRows
from plait.app.data.token_shards import Corpus, TokenShard
from plait.app.train.run_data import ReadAhead


class Numbered:
    """Rows that hold the number of their corpus, and their own."""

    def __init__(self, corpus: int, count: int) -> None:
        self.corpus, self.count = corpus, count

    def take(self, rows: Any) -> Any:
        found = torch.tensor([[self.corpus, int(row)] for row in rows]).view(-1, 2)
        return found, found


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    rows=st.lists(st.integers(1, 5000), min_size=5, max_size=5),
    seed=st.integers(0, 100),
)
def test_each_corpus_of_a_mixture_has_its_share_of_each_block_and_each_row_once_an_epoch(
    weights: list[float], rows: list[int], seed: int
) -> None:
    """In each block of rows each corpus has its share; of its own rows each comes once in an epoch."""
    corpora = [Numbered(number, count) for number, count in enumerate(rows[: len(weights)])]
    made = MixedBatches(corpora, weights, BLOCK, seed)
    assert int(made.shares.sum()) == BLOCK
    assert np.abs(made.shares - np.array(weights) / sum(weights) * BLOCK).max() < 1
    seen: list[list[int]] = [[] for _ in corpora]
    for step in range(4):
        inputs, _ = made.batch(step, slice(None))
        found = Counter(inputs[:, 0].tolist())
        assert [found[number] for number in range(len(corpora))] == made.shares.tolist()
        for corpus, row in inputs.tolist():
            seen[corpus].append(row)
    for each, taken in zip(corpora, seen, strict=True):
        times = np.bincount(taken, minlength=each.count) if taken else np.zeros(each.count)
        assert times.max() - times.min() <= 1


def test_parts_of_a_batch_are_the_batch_and_it_stays_that_of_earlier_versions() -> None:
    made = MixedBatches([Numbered(0, 7), Numbered(1, 9)], [1, 2], 12, 3)
    whole, _ = made.batch(90, slice(None))
    parts = [made.batch(90, slice(first, first + 4))[0] for first in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)
    of_second = [4, None, 6, None, 4, None, 2, 2, 4, 0, None, 0]
    of_first = iter([2, 4, 4, 6])
    assert whole.tolist() == [[0, next(of_first)] if row is None else [1, row] for row in of_second]
    assert description(made) == {"size": 12, "seed": 3, "rows": [7, 9], "weights": [1, 2]}
    assert (made.rows, made.shares.tolist()) == (min(1024 * 7 // 341, 1024 * 9 // 683), [341, 683])
    assert made.epochs(100) == [1200 * 341 / 1024 / 7, 1200 * 683 / 1024 / 9]
    assert MixedBatches([Numbered(0, 7), Numbered(1, 9)], [1, 1 << 20], 12, 3).rows == 9, "none of the first"


def test_document_ids_of_a_mixture_stay_apart_beside_corpora_without_documents() -> None:
    shard = TokenShard(np.arange(6), np.array([2, 6]))
    packed = DocumentRows(Corpus([shard]), 6, 10, "some")

    class Plain:
        count = 1

        def take(self, rows: Any) -> Any:
            return torch.full((len(rows), 6), 9), torch.zeros(len(rows), 6, dtype=torch.int64)

    inputs, targets = ConcatenatedRows([Plain(), packed]).take(np.array([1, 0, 1]))
    assert inputs["tokens"].tolist() == [[*range(6)], [9] * 6, [*range(6)]]  # type: ignore[index]
    assert inputs["document_ids"].tolist() == [[0, 0, 1, 1, 1, 1], [0] * 6, [0, 0, 1, 1, 1, 1]]  # type: ignore[index]
    assert targets[1].tolist() == [0] * 6


def test_the_next_batch_of_a_mixture_is_read_in_the_background() -> None:
    plain = RandomBatches(7, 5, 4, 0)
    asked: list[tuple[int, str]] = []

    class Watched:
        size = 4

        def batch(self, step: int, rows: slice) -> Any:
            asked.append((step, threading.current_thread().name))
            if step == 9:
                raise OSError("broken disk")
            return plain.batch(step, rows)

    ahead = ReadAhead(Watched())
    assert (ahead.size, ahead.rows, row_total(ahead), ahead.describe()) == (4, None, None, {"size": 4})
    for step in (0, 1, 2, 7):
        assert torch.equal(ahead.batch(step, slice(1, 3))[0], plain.batch(step, slice(1, 3))[0])
    ahead.batch(8, slice(1, 3))
    with pytest.raises(OSError, match="broken disk"):
        ahead.batch(9, slice(1, 3))
    own = [step for step, name in asked if not name.startswith("plait-read-ahead")]
    assert own == [0, 7], "the first of each run of steps"
    ahead = ReadAhead(plain)
    for step, rows in enumerate([slice(0, 2), slice(0, 3), slice(None), slice(1, None), slice(2, None)]):
        assert torch.equal(ahead.batch(step, rows)[0], plain.batch(step, rows)[0]), "of other rows"
