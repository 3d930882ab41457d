"""Routes between layouts: each element once to each rank that needs it, none from itself over the wire."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layout import layouts
from test_layout_flat import flat_layouts

from plait.errors import LayoutError
from plait.plan.layout.layout import Box, Layout, Replicate, Shard
from plait.plan.layout.routes import BoxRouter, RankBoxes, boxes_by_rank, without
from plait.plan.layout.shards import full_box, is_tiling


def held_by(layout: Layout) -> dict[int, tuple[Box, ...]]:
    places = (dict(zip(layout.axes, where, strict=True)) for where in layout.coordinates())
    return boxes_by_rank(layout, enumerate(places))


def count_of(boxes: tuple[Box, ...] | list[Box], shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    return count


def check(held: RankBoxes, needed: RankBoxes, shape: tuple[int, ...]) -> None:
    """Every rank gets what it needs exactly once, from a rank that has it, and from itself what it has."""
    router = BoxRouter()
    transfers = router.transfers("one", held, needed, itemsize=8)
    sent = Counter[int]()
    for rank, boxes in needed.items():
        mine = [one for one in transfers if one.receiver == rank]
        assert torch.equal(count_of([one.box for one in mine], shape), count_of(list(boxes), shape))
        own = count_of(list(held.get(rank, ())), shape)
        for one in mine:
            assert bool(own[one.box.slices].all() if one.is_local else not own[one.box.slices].any())
            assert bool(count_of(list(held[one.sender]), shape)[one.box.slices].all())
            sent[one.sender] += 0 if one.is_local else 8 * one.box.numel
    assert Counter(router.sent) == sent
    assert transfers == BoxRouter().transfers("one", held, needed, itemsize=8)


@given(st.data(), layouts(partial=False) | flat_layouts(partial=False), st.booleans())
def test_ranks_get_each_element_of_another_layout_once_and_own_ones_from_themselves(
    data: st.DataObject, before: Layout, swaps: bool
) -> None:
    after = Layout(
        before.shape, {"all": data.draw(st.integers(1, 4))}, {"all": Shard(0)} if before.shape else {}
    )
    first, second = (after, before) if swaps else (before, after)
    check(held_by(first), held_by(second), before.shape)


boxes_in_5_by_4 = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)).map(
    lambda t: Box(t[:2], (min(t[2], 5 - t[0]), min(t[3], 4 - t[1])))
)


@given(st.lists(boxes_in_5_by_4, max_size=4), boxes_in_5_by_4)
def test_holders_of_overlapping_boxes_share_what_is_sent(held: list[Box], needed: Box) -> None:
    whole = {9: (full_box((5, 4)),)}
    check(whole | {rank: (box,) for rank, box in enumerate(held)}, {0: (needed,), 7: (needed,)}, (5, 4))


@given(boxes_in_5_by_4, boxes_in_5_by_4)
def test_a_box_without_another_is_the_boxes_of_its_other_elements(one: Box, other: Box) -> None:
    left = count_of(without(one, other), (5, 4))
    inside = count_of([other], (5, 4))
    assert torch.equal(left, count_of([one], (5, 4)) * (1 - inside))
    assert is_tiling((5, 4), [one, *without(full_box((5, 4)), one)])


def test_copies_share_the_sending_and_the_nearest_sends_first() -> None:
    layout = Layout((8, 2), {"replicate": 4}, {"replicate": Replicate()})
    router, rows = BoxRouter(), {rank: (Box((0, 0), (2, 2)),) for rank in (4, 5, 6, 7)}
    transfers = router.transfers("weight", held_by(layout), rows, itemsize=4)
    assert [(one.sender, one.receiver) for one in transfers] == [(3, 4), (2, 5), (1, 6), (0, 7)]
    assert router.sent == dict.fromkeys(range(4), 16)


def test_what_no_rank_holds_is_refused_with_its_tensor() -> None:
    half = {0: (Box((0,), (4,)),)}
    with pytest.raises(
        LayoutError, match=r"rank 1 needs 8 elements of norm\.weight, of which no rank holds 4:"
    ):
        BoxRouter().transfers("norm.weight", half, {1: (Box((0,), (8,)),)}, itemsize=8)
