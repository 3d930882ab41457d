"""Calls for a block cover its visible pairs once, and are few."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from attention_cases import LAYOUTS, contiguous, striped, visible, zigzag
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.tensor.attention import kernel_calls
from plait.tensor.attention.kernel_calls import BlockCall, block_calls, with_intervals_on
from plait.tensor.attention.visible_keys import document_bounds, needed_keys, visible_indices, visible_range


def calls_of(
    queries: Tensor,
    keys: Tensor,
    length: int,
    *,
    causal: bool = True,
    window: int | None = None,
    ids: Tensor | None = None,
) -> tuple[BlockCall, ...]:
    bounds = None if ids is None else document_bounds(ids)
    lo, hi = visible_range(queries.numpy(), length, causal=causal, window=window, documents=bounds)
    return block_calls(*visible_indices(lo, hi, keys.numpy()))


def counted(calls: Sequence[BlockCall], rows: int, queries: int, keys: int) -> Tensor:
    """How often the calls compute each pair: `[rows, queries, keys]`."""
    count = torch.zeros(rows, queries, keys, dtype=torch.int64)
    for call in calls:
        target = count[call.rows, call.query, call.key]
        _, n, m = target.shape
        assert n == call.query.stop - call.query.start
        assert m == call.key.stop - call.key.start
        mask = torch.ones(n, m, dtype=torch.bool) if isinstance(call.mask, str) else call.mask
        assert mask.shape == (n, m)
        target += mask.tril() if call.mask == "causal" else mask
    return count


def documents(rows: int, length: int, longest: int) -> Tensor:
    """Ids of documents of random lengths, by torch's default generator."""
    return (torch.rand(rows, length) < 2 / (1 + longest)).cumsum(1)


@given(
    layouts=st.tuples(*2 * [st.sampled_from(list(LAYOUTS))]),
    ranks=st.integers(1, 4),
    length=st.integers(0, 90),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 100),
    longest=st.none() | st.integers(1, 60),
    rows=st.integers(1, 3),
    alike=st.booleans(),
    only_needed=st.booleans(),
    sizes=st.sampled_from([(1, 1), (4, 2), (8, 5), (256, 32)]),
    seed=st.integers(0, 999),
)
def test_block_calls_compute_each_visible_pair_once(
    layouts: tuple[str, str],
    ranks: int,
    length: int,
    causal: bool,
    window: int | None,
    longest: int | None,
    rows: int,
    alike: bool,
    only_needed: bool,
    sizes: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    queries, keys = (
        LAYOUTS[name](length, ranks, seed * step % ranks) for name, step in zip(layouts, (1, 3), strict=True)
    )
    if seed % 5 == 0:  # any keys
        keys = (torch.rand(length) < 0.5).nonzero().squeeze(1)
    ids = None if longest is None else documents(rows, length, longest)
    if ids is not None and alike:
        ids = ids[:1].expand(rows, -1)
    bounds = None if ids is None else document_bounds(ids)
    lo, hi = visible_range(queries.numpy(), length, causal=causal, window=window, documents=bounds)
    if only_needed:
        keys = keys[torch.from_numpy(needed_keys(*visible_indices(lo, hi, keys.numpy()), len(keys)))]
    with patch.object(kernel_calls, "TILE", sizes[0]), patch.object(kernel_calls, "SHORT", sizes[1]):
        calls = block_calls(*visible_indices(lo, hi, keys.numpy()))
    expected = visible(queries, keys, causal=causal, window=window, ids=ids)
    count = counted(calls, rows, len(queries), len(keys))
    assert torch.equal(count, expected.long().expand(rows, -1, -1))


def shapes(calls: Sequence[BlockCall]) -> list[tuple[object, ...]]:
    """Of each call the mask's kind, and the first and last index plus one of queries and keys."""
    kinds = (call.mask if isinstance(call.mask, str) else "mask" for call in calls)
    return [
        (kind, call.query.start, call.query.stop, call.key.start, call.key.stop)
        for kind, call in zip(kinds, calls, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_s_own_block_is_one_causal_call(layout: object) -> None:
    own = layout(1000, 4, 1)  # type: ignore[operator]
    (call,) = calls_of(own, own, 1000)
    assert shapes([call]) == [("causal", 0, 250, 0, 250)]
    assert call.rows == slice(None)


def test_calls_on_another_ranks_keys_follow_from_the_context_layout() -> None:
    def of(layout: object, rank: int, other: int) -> list[tuple[object, ...]]:
        return shapes(calls_of(layout(800, 4, rank), layout(800, 4, other), 800))  # type: ignore[operator]

    assert of(contiguous, 2, 1) == [("full", 0, 200, 0, 200)]
    assert of(contiguous, 1, 2) == []
    # Zigzag: all queries see the first chunk of an earlier rank, the second chunk's both of a later.
    assert of(zigzag, 2, 1) == [("full", 0, 200, 0, 100)]
    assert of(zigzag, 1, 2) == [("full", 100, 200, 0, 200)]
    # Striped: with the key of the same index, or only with those before it.
    assert of(striped, 2, 1) == [("causal", 0, 200, 0, 200)]
    assert of(striped, 1, 2) == [("causal", 1, 200, 0, 199)]


def test_without_a_causal_mask_a_block_is_one_call() -> None:
    for layout in LAYOUTS.values():
        calls = calls_of(layout(801, 4, 1), layout(801, 4, 3), 801, causal=False)
        assert shapes(calls) == [("full", 0, len(layout(801, 4, 1)), 0, len(layout(801, 4, 3)))]


def test_queries_and_keys_cut_at_different_places_give_full_and_causal_calls() -> None:
    assert shapes(calls_of(torch.arange(5, 20), torch.arange(10), 20)) == [
        ("full", 0, 15, 0, 5),
        ("causal", 0, 15, 5, 10),  # those after the fifth see all
    ]
    # A zigzag rank's queries to the keys of all ranks.
    assert shapes(calls_of(zigzag(800, 4, 1), torch.arange(800), 800)) == [
        ("full", 0, 100, 0, 100),
        ("causal", 0, 100, 100, 200),
        ("full", 100, 200, 0, 600),
        ("causal", 100, 200, 600, 700),
    ]


def test_missing_keys_split_a_causal_block_into_several_calls() -> None:
    # Queries 1 and 2 see what query 0 sees, then each sees one key more.
    queries, keys = torch.arange(6), torch.tensor([0, 3, 4, 5])
    with patch.object(kernel_calls, "SHORT", 1):
        calls = calls_of(queries, keys, 6)
    assert shapes(calls) == [("full", 0, 3, 0, 1), ("full", 3, 6, 0, 1), ("causal", 3, 6, 1, 4)]


LENGTHS = (100, 300, 250, 50, 300)
IDS = torch.arange(5).repeat_interleave(torch.tensor(LENGTHS))[None]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_one_block_call_for_each_document(causal: bool) -> None:
    own = torch.arange(1000)
    kind = "causal" if causal else "full"
    expected = [
        (kind, start, stop, start, stop)
        for start, stop in ((0, 100), (100, 400), (400, 650), (650, 700), (700, 1000))
    ]
    assert shapes(calls_of(own, own, 1000, causal=causal, ids=IDS)) == expected


def test_documents_that_begin_on_another_rank_give_full_calls() -> None:
    mine, before = contiguous(1000, 4, 1), contiguous(1000, 4, 0)
    assert shapes(calls_of(mine, before, 1000, ids=IDS)) == [("full", 0, 150, 100, 250)]
    assert shapes(calls_of(mine, mine, 1000, ids=IDS)) == [
        ("causal", 0, 150, 0, 150),
        ("causal", 150, 250, 150, 250),
    ]


def test_each_document_on_striped_positions_is_one_causal_call() -> None:
    # Rank 2's token of index i stands before rank 3's, and after rank 1's.
    calls = calls_of(striped(1000, 5, 2), striped(1000, 5, 3), 1000, ids=IDS)
    assert [shape[0] for shape in shapes(calls)] == ["causal"] * len(LENGTHS)
    calls = calls_of(striped(1000, 5, 2), striped(1000, 5, 1), 1000, ids=IDS)
    assert [shape[0] for shape in shapes(calls)] == ["causal"] * len(LENGTHS)


def test_short_documents_share_a_call() -> None:
    own, ids = torch.arange(1000), torch.arange(1000)[None] // 10
    assert shapes(calls_of(own, own, 1000, ids=ids)) == [
        ("mask", 0, 256, 0, 256),
        ("mask", 256, 512, 250, 512),
        ("mask", 512, 768, 510, 768),
        ("mask", 768, 1000, 760, 1000),
    ]


def test_rows_with_the_same_documents_share_block_calls() -> None:
    own, other = torch.arange(1000), IDS.clone()
    other[:, 400:] = 7  # two documents and one long one
    calls = calls_of(own, own, 1000, ids=IDS.expand(3, -1))
    assert [call.rows for call in calls] == [slice(None)] * 5
    calls = calls_of(own, own, 1000, ids=torch.cat([IDS, IDS, other, IDS]))
    assert [call.rows for call in calls] == [slice(0, 2)] * 5 + [slice(2, 3)] * 3 + [slice(3, 4)] * 5


def test_a_window_takes_tiles_that_share_a_mask() -> None:
    own = torch.arange(1124)
    calls = calls_of(own, own, 1124, window=100)
    assert shapes(calls) == [
        ("causal", 0, 100, 0, 100),
        ("mask", 100, 356, 1, 356),
        ("mask", 356, 612, 257, 612),
        ("mask", 612, 868, 513, 868),
        ("mask", 868, 1124, 769, 1124),
    ]
    assert len({id(call.seen) for call in calls[1:]}) == 1
    calls = calls_of(
        own.repeat_interleave(1), own, 1124, window=100, ids=torch.tensor([[0], [1]]).expand(-1, 1124)
    )
    assert [call.rows for call in calls] == [slice(None)] * 5


def test_the_pairs_of_a_window_grow_with_the_length_only() -> None:
    def area(queries: Tensor, length: int) -> int:
        calls = calls_of(queries, torch.arange(length), length, window=64)
        return sum((call.query.stop - call.query.start) * (call.key.stop - call.key.start) for call in calls)

    for layout in (contiguous, zigzag):
        # No tile spans the two chunks of a zigzag rank, whose length is no multiple of a tile's.
        small, large = (area(layout(length, 4, 1), length) for length in (4000, 64000))
        assert large < 17 * small, layout
        assert large < 64000 // 4 * (64 + 256)


@pytest.mark.parametrize(("count", "most_calls", "most_pairs"), [(1, 1, 1.01), (16, 16, 1.05), (64, 64, 1.1)])
def test_the_pairs_of_documents_are_those_that_are_seen(
    count: int, most_calls: int, most_pairs: float
) -> None:
    """But for the diagonal, and for masks that short documents share: not 4,096 pairs for each query."""
    torch.manual_seed(count)
    own, begins = torch.arange(4096), torch.zeros(4096, dtype=torch.int64)
    begins[1 + torch.randperm(4095)[: count - 1]] = 1
    ids = begins.cumsum(0)[None]
    calls = calls_of(own, own, 4096, ids=ids)
    areas = [(call.query.stop - call.query.start) * (call.key.stop - call.key.start) for call in calls]
    parts = [
        area / 2 if isinstance(call.seen, str) else area for area, call in zip(areas, calls, strict=True)
    ]
    assert len(calls) <= most_calls
    assert sum(parts) < most_pairs * float((ids[0].bincount() ** 2).sum()) / 2


def test_keys_that_all_queries_of_a_tile_see_need_no_mask() -> None:
    # Every fourth token's query, the keys of all: each query sees four keys more than the one before it.
    assert shapes(calls_of(striped(2000, 4, 0), torch.arange(2000), 2000)) == [
        ("mask", 0, 256, 0, 1021),
        ("full", 256, 500, 0, 1025),
        ("mask", 256, 500, 1025, 1997),
    ]


def test_no_queries_or_no_keys_give_no_call() -> None:
    none = torch.arange(0)
    assert calls_of(none, torch.arange(4), 4) == ()
    assert calls_of(torch.arange(4), none, 4) == ()
    assert calls_of(torch.arange(4), torch.arange(4), 4, ids=torch.zeros(0, 4)) == ()
    assert shapes(calls_of(torch.arange(1), torch.arange(1), 1)) == [("full", 0, 1, 0, 1)]


def test_document_intervals_are_copied_to_a_device_once() -> None:
    own = torch.arange(1124)
    calls = calls_of(own, own, 1124, window=100)
    moved = with_intervals_on(calls, torch.device("meta"))
    assert shapes(moved) == shapes(calls)
    intervals = [call.seen for call in moved if isinstance(call.seen, Tensor)]
    assert intervals[0].is_meta
    assert len({id(one) for one in intervals}) == 1
    (mask,) = {tuple(call.mask.shape) for call in moved if isinstance(call.mask, Tensor)}
    assert mask == (256, 355)
