"""Shards as boxes of the global tensor: each element of it once, and each where it belongs."""

from __future__ import annotations

import torch
from hypothesis import given
from test_layout import filled, layouts
from test_layout_flat import flat_layouts

from plait.plan.layout import Box, Flat, Layout, Shard, shard
from plait.plan.layout.shards import intersection, is_tiling, shard_boxes, slices_within


def boxes_of(layout: Layout, *where: int) -> list[Box]:
    return [part.box for part in shard_boxes(layout, where)]


def check_tiles(layout: Layout) -> None:
    """The boxes of all owners tile the global tensor, and hold what `shard` cuts."""
    whole = filled(layout.shape)
    count = torch.zeros(layout.shape, dtype=torch.int64)
    boxes: list[Box] = []
    for where in layout.coordinates():
        local = shard(whole, layout, where)
        for part in shard_boxes(layout, where):
            view = part.view_of(local)
            assert tuple(view.shape) == part.box.sizes
            assert torch.equal(view, whole[part.box.slices])
            assert view.numel() > 0
            if layout.owner(where) == where:
                count[part.box.slices] += 1
                boxes.append(part.box)
    assert bool((count == 1).all())
    assert is_tiling(layout.shape, boxes)
    if boxes:
        assert not is_tiling(layout.shape, boxes[1:])
        assert not is_tiling(layout.shape, [*boxes, boxes[-1]])


@given(flat_layouts(partial=False))
def test_boxes_of_flat_shards_tile_the_tensor(layout: Layout) -> None:
    check_tiles(layout)


@given(layouts(partial=False))
def test_boxes_of_shards_tile_the_tensor(layout: Layout) -> None:
    check_tiles(layout)


def test_a_flat_shard_of_a_matrix_has_three_boxes_at_most() -> None:
    layout = Layout((4, 6), {"shard": 3}, {"shard": Flat((0, 4, 21, 24))})
    assert boxes_of(layout, 0) == [Box((0, 0), (1, 4))]
    assert boxes_of(layout, 1) == [Box((0, 4), (1, 2)), Box((1, 0), (2, 6)), Box((3, 0), (1, 3))]
    assert boxes_of(layout, 2) == [Box((3, 3), (1, 3))]


def test_blocks_of_a_shard_are_boxes_of_their_own() -> None:
    layout = Layout((2, 6), {"shard": 2, "tp": 2}, {"tp": Shard(1, blocks=3), "shard": Flat((0, 2, 6))})
    # Rank 0 of tp holds columns 0, 2 and 4.
    assert boxes_of(layout, 0, 0) == [Box((0, 0), (1, 1)), Box((0, 2), (1, 1))]
    assert boxes_of(layout, 1, 0) == [
        Box((0, 4), (1, 1)),
        Box((1, 0), (1, 1)),
        Box((1, 2), (1, 1)),
        Box((1, 4), (1, 1)),
    ]
    check_tiles(layout)


def test_a_scalar_is_a_box_without_dims() -> None:
    assert boxes_of(Layout((), {"dp": 2}), 1) == [Box((), ())]
    assert boxes_of(Layout((), {"shard": 2}, {"shard": Flat((0, 1, 1))}), 1) == []
    assert boxes_of(Layout((0, 3), {"dp": 1}), 0) == []


def test_the_intersection_of_two_boxes_is_the_common_box() -> None:
    one = Box((0, 2), (4, 4))
    assert intersection(one, Box((2, 0), (4, 3))) == Box((2, 2), (2, 1))
    assert intersection(one, Box((4, 0), (4, 9))).numel == 0
    assert slices_within(Box((2, 2), (2, 1)), one) == (slice(2, 4), slice(0, 1))


def test_boxes_that_overlap_do_not_tile_even_if_their_sizes_add_up() -> None:
    one, other = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    assert is_tiling((4, 3), [other, one])
    assert not is_tiling((4, 3), [one, one])  # twice the same
    assert not is_tiling((4, 3), [one, Box((1, 0), (2, 3))])  # overlapping
    assert not is_tiling((4, 3), [one, Box((3, 0), (2, 3))])  # outside
    assert not is_tiling((4, 3), [one, Box((2,), (6,))])  # of another tensor
    assert not is_tiling((4, 3), [one, Box((2, 0), (-2, -3))])
    assert is_tiling((), [Box((), ())])
    assert is_tiling((0, 3), [])
    assert is_tiling((0, 3), [Box((0, 0), (0, 3))])
