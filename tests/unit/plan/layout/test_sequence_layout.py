"""Which positions of a sequence each rank holds."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.plan.layout.sequence_layout import SequenceLayout, parts_of, sequence_layout

KINDS = ("zigzag", "striped", "contiguous")
some_layouts = st.builds(sequence_layout, st.integers(0, 50), st.integers(1, 6), st.sampled_from(KINDS))


def listed(layout: SequenceLayout) -> list[list[int]]:
    return [list(chain.from_iterable(held)) for held in layout.ranges]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("striped", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_each_layout_of_twelve_positions_on_three_ranks_is_the_listed_one(
    kind: Any, expected: list[list[int]]
) -> None:
    assert listed(sequence_layout(12, 3, kind)) == expected


def test_a_length_that_does_not_divide_gives_the_first_chunks_one_more() -> None:
    assert listed(sequence_layout(7, 2, "zigzag")) == [[0, 5, 6], [1, 2, 3, 4]]
    assert listed(sequence_layout(7, 2, "striped")) == [[0, 2, 4, 6], [1, 3, 5]]
    assert listed(sequence_layout(7, 2, "contiguous")) == [[0, 1, 2, 3], [4, 5, 6]]
    assert listed(sequence_layout(3, 4, "zigzag")) == [[0], [1], [], [2]]
    assert listed(sequence_layout(0, 2, "striped")) == [[], []]


@given(some_layouts)
def test_each_position_is_on_one_rank_and_ascending(layout: SequenceLayout) -> None:
    each = listed(layout)
    assert sorted(chain.from_iterable(each)) == list(range(layout.length))
    assert all(held == sorted(held) for held in each)
    assert [layout.size(rank) for rank in range(layout.ranks)] == list(map(len, each))
    assert [layout.positions(rank).tolist() for rank in range(layout.ranks)] == each


@given(some_layouts, st.integers(0, 2))
def test_joining_the_parts_of_a_sequence_gives_the_sequence(layout: SequenceLayout, dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = layout.length
    whole = torch.randn(shape)
    parts = [layout.cut(whole, rank, dim) for rank in range(layout.ranks)]
    assert [part.shape[dim] for part in parts] == [layout.size(rank) for rank in range(layout.ranks)]
    assert torch.equal(layout.join(parts, dim), whole)
    assert not any(part.data_ptr() == whole.data_ptr() for part in parts if part.numel())


@given(st.integers(1, 8), st.integers(0, 3))
def test_zigzag_and_striped_give_equal_work(ranks: int, more: int) -> None:
    """Pairs of a query and a key that it sees, the most of a rank over the mean."""
    length = 64 * ranks + more * 17
    for kind, most in (("zigzag", 1.01), ("striped", 1.02)):
        layout = sequence_layout(length, ranks, kind)  # type: ignore[arg-type]
        pairs = [float((layout.positions(rank) + 1).sum()) for rank in range(ranks)]
        assert max(pairs) * ranks / sum(pairs) < most


def test_contiguous_gives_the_last_rank_the_most_work() -> None:
    layout = sequence_layout(4096, 4, "contiguous")
    pairs = [float((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert round(max(pairs) * 4 / sum(pairs), 2) == 1.75


@given(some_layouts, st.integers(0, 60), st.integers(0, 60))
def test_a_slice_of_position_ranges_has_the_positions_of_the_slice(
    layout: SequenceLayout, start: int, stop: int
) -> None:
    for held in layout.ranges:
        part = parts_of(held, slice(start, stop))
        assert list(chain.from_iterable(part)) == list(chain.from_iterable(held))[start:stop]
        assert all(part)


def test_a_full_slice_of_position_ranges_is_unchanged() -> None:
    assert parts_of((range(3), range(8, 20, 4)), slice(None)) == (range(3), range(8, 20, 4))
