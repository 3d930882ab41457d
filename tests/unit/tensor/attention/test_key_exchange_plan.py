"""Which keys go where, in numbers, and the pairs that each rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.plan.layout.sequence_layout import SequenceLayout, sequence_layout
from plait.tensor.attention import attention
from plait.tensor.attention.key_exchange_plan import (
    ExchangePlan,
    Mask,
    add_selected,
    build_plan,
    exchange_plan,
    remembered_plan,
    selected,
)
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, DocumentBounds, running

KINDS: tuple[Any, ...] = ("zigzag", "striped", "contiguous")


def plans(layout: SequenceLayout, mask: Mask, documents: DocumentBounds | None = None) -> list[ExchangePlan]:
    return [build_plan(layout, rank, mask, documents) for rank in range(layout.ranks)]


def sent(layout: SequenceLayout, mask: Mask, documents: DocumentBounds | None = None) -> int:
    return sum(sum(plan.sent(1)) for plan in plans(layout, mask, documents))


def test_with_zigzag_a_lower_rank_does_not_send_its_second_half_upwards() -> None:
    first, second = plans(sequence_layout(16, 2, "zigzag"), Mask())
    assert first.sent(1) == [0, 4]
    assert second.sent(1) == [8, 0]
    assert [peer and peer.sent for peer in first.peers] == [None, slice(0, 4)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_each_layout_exchanges_the_computed_share_of_keys_under_a_causal_mask(ranks: int) -> None:
    """Of all keys to all ranks: zigzag three quarters, contiguous half, striped all but the last ones."""
    length = 8 * ranks
    whole = length * (ranks - 1)
    assert sent(sequence_layout(length, ranks, "zigzag"), Mask()) == 0.75 * whole
    assert sent(sequence_layout(length, ranks, "contiguous"), Mask()) == 0.5 * whole
    assert whole - ranks * (ranks - 1) // 2 == sent(sequence_layout(length, ranks, "striped"), Mask())
    for kind in KINDS:
        assert sent(sequence_layout(length, ranks, kind), Mask(causal=False)) == whole


def test_with_a_window_only_keys_at_the_border_are_sent() -> None:
    assert sent(sequence_layout(64, 4, "contiguous"), Mask(window=5)) == 3 * 4
    assert (
        sent(sequence_layout(64, 4, "zigzag"), Mask(window=5)) == 6 * 4
    )  # two borders more, one within a rank


def test_documents_within_a_rank_exchange_no_keys() -> None:
    ids = torch.arange(64)[None] // 16
    bounds = document_bounds(ids)
    assert sent(sequence_layout(64, 4, "contiguous"), Mask(), bounds) == 0
    assert sent(sequence_layout(64, 4, "contiguous"), Mask()) == 6 * 16


@st.composite
def cases(draw: st.DrawFn) -> tuple[SequenceLayout, Mask, Tensor | None]:
    layout = draw(st.builds(sequence_layout, st.integers(0, 40), st.integers(1, 5), st.sampled_from(KINDS)))
    mask = draw(st.builds(Mask, st.booleans(), st.one_of(st.none(), st.integers(1, 12))))
    begins = draw(st.lists(st.booleans(), min_size=2 * layout.length, max_size=2 * layout.length))
    ids = torch.tensor(begins, dtype=torch.int64).view(2, -1).cumsum(1)
    return layout, mask, draw(st.sampled_from([ids, None]))


def visible(length: int, mask: Mask, ids: Tensor | None) -> Tensor:
    """Bool `[rows, queries, keys]`, by brute force."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (query - key).abs() < (mask.window or length + 1)
    seen &= (key <= query) | torch.tensor(not mask.causal)
    if ids is None:
        return seen.expand(2, -1, -1)
    runs = torch.ones_like(ids)
    runs[:, 1:] = (ids[:, 1:] != ids[:, :-1]).long()
    runs = runs.cumsum(1)
    return seen & (runs[:, :, None] == runs[:, None])


def computed(calls: Any, shape: tuple[int, int]) -> Tensor:
    """How often each pair of a query and a key is computed: `[rows, queries, keys]`."""
    times = torch.zeros(2, *shape, dtype=torch.int64)
    for call in calls:
        part = times[call.rows, call.query, call.key]
        seen = torch.ones(part.shape[1:], dtype=torch.bool)
        if isinstance(call.mask, Tensor):
            seen = call.mask
        elif call.mask == "causal":
            seen = seen.tril()
        part += seen
    return times


@given(cases())
def test_every_visible_pair_is_computed_once_by_the_rank_of_its_query(
    case: tuple[SequenceLayout, Mask, Tensor | None],
) -> None:
    layout, mask, ids = case
    documents = None if ids is None else document_bounds(ids)
    seen = visible(layout.length, mask, ids)
    each = plans(layout, mask, documents)
    for rank, plan in enumerate(each):
        mine = layout.positions(rank)
        own = seen[:, mine][:, :, mine]
        assert torch.equal(computed(plan.own, (len(mine), len(mine))), own.long())
        for other, block in enumerate(plan.peers):
            if block is None:
                continue
            back = each[other].peers[rank]
            assert back is not None
            assert back.sent_count == block.received_count
            selected = layout.positions(other)[back.sent]
            rest = seen[:, mine].clone()
            times = computed(block.calls, (len(mine), len(selected)))
            assert torch.equal(times, rest[:, :, selected].long())
            assert int(times.sum()) == int(rest[:, :, layout.positions(other)].sum()), "no pair is left out"
            assert bool(times.any(0).any(0).all()), "every key that is sent is seen"


def builds(documents: Sequence[DocumentBounds | None], mask: Mask) -> int:
    """How many plans are built for attention to all of these micro-batches, on two devices."""
    remembered_plan.cache_clear()
    for one in documents:
        sequence = ContextParallelism.of_one_rank().sequence(6, one)
        for device in ("cpu", "meta", "cpu"):
            exchange_plan(sequence, mask, torch.device(device))
    return remembered_plan.cache_info().misses


def test_a_plan_is_built_once_for_equal_documents() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    alike, other = [document_bounds(ids + first) for first in (0, 7, 9)], document_bounds(ids.flip(0))
    assert builds(alike, Mask()) == builds(alike, Mask(window=3)) == 1
    assert builds([*alike, other, *alike], Mask()) == 2


def test_where_each_row_is_one_document_its_id_does_not_matter() -> None:
    """Nor does the number of rows, or that there are ids: without context parallelism nothing is built."""
    ids = torch.tensor([[3] * 6, [4] * 6])
    alike = [None, document_bounds(ids[:1]), document_bounds(ids)]
    assert builds(alike, Mask(window=3)) == 1
    remembered_plan.cache_clear()
    for one in alike:
        with running(ContextParallelism.of_one_rank().sequence(6, one)):
            attention(*torch.randn(3, 2, 2, 6, 8))
    assert remembered_plan.cache_info().misses == 0


def test_positions_are_read_and_added_to_by_slices_and_by_indices() -> None:
    which = {"slice": slice(1, 4), "indices": torch.tensor([0, 3, 4])}
    for name, positions in which.items():
        numbers = torch.arange(5)[positions]
        tensor = torch.randn(2, 3, 5, 2)
        assert torch.equal(selected(tensor, positions), torch.stack([tensor[:, :, n] for n in numbers], 2)), (
            name
        )
        total, summand = tensor.clone(), torch.randn(2, 3, 3, 2, dtype=torch.float64)
        add_selected(total, positions, summand)
        expected = tensor.clone()
        for place, number in enumerate(numbers.tolist()):
            expected[:, :, number] += summand[:, :, place].float()
        torch.testing.assert_close(total, expected)


def test_a_plan_holds_no_masks() -> None:
    """Two int32 for each query of a call with a mask, though its mask has a bool for each pair."""
    layout, ids = sequence_layout(1124, 1, "zigzag"), torch.arange(1124)[None] // 10
    for mask, documents in ((Mask(window=100), None), (Mask(), document_bounds(ids))):
        calls = build_plan(layout, 0, mask, documents).own
        held = {id(one.seen): one.seen.nbytes for one in calls if isinstance(one.seen, Tensor)}
        assert sum(held.values()) <= 2 * 4 * 1124
