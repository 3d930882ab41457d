"""Shards that begin and end at any element: `Flat`."""

from __future__ import annotations

import pickle
import re
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_layout import DTYPES, UNEVEN, cut, factorings, filled, layouts

from plait.errors import LayoutError
from plait.plan.layout import Box, Flat, Layout, Replicate, Shard, assemble, moves, reshape, shard


@st.composite
def flat_layouts(draw: st.DrawFn, partial: bool = True, sizes: tuple[int, ...] = tuple(range(6))) -> Layout:
    """As `layouts`, where `shard` and `cp` cut what the others leave at any elements, or behind the last."""
    layout = draw(layouts(partial, sizes).filter(lambda layout: len(layout.axes) > 1))
    placements = dict(zip(layout.axes, layout.placements, strict=True)) | {"shard": Replicate()}
    axes = dict(zip(layout.axes, layout.degrees, strict=True))
    whole = Layout(layout.shape, axes, placements)
    largest = prod(whole.sizes([0] * len(axes)))
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    most = cp * axes["shard"] - 1
    cuts = draw(st.lists(st.integers(0, largest + 2), min_size=most, max_size=most))
    bounds = (0, *sorted(cuts), max([largest + draw(st.integers(0, 2)), *cuts]))
    flat = {"shard": Flat(bounds[::cp])} | ({"cp": Flat(bounds)} if cp > 1 else {})
    return Layout(layout.shape, axes | ({"cp": cp} if cp > 1 else {}), placements | flat)


def over_shard(shape: tuple[int, ...], *bounds: int) -> Layout:
    return Layout(shape, {"shard": len(bounds) - 1}, {"shard": Flat(bounds)})


def test_flat_shards_of_whole_rows_keep_the_shape_of_rows() -> None:
    layout = over_shard((4, 3), 0, 6, 9, 12)
    assert [layout.interval((rank,)) for rank in range(3)] == [range(0, 6), range(6, 9), range(9, 12)]
    assert [layout.local_shape((rank,)) for rank in range(3)] == [(2, 3), (1, 3), (1, 3)]
    assert [layout.box((rank,)) for rank in range(3)] == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (1, 3)),
        Box((3, 0), (1, 3)),
    ]
    assert shard(filled((4, 3)), layout, (1,)).tolist() == [filled((4, 3))[2].tolist()]


def test_flat_shards_within_rows_are_one_dimensional_and_no_box() -> None:
    layout = over_shard((4, 3), 0, 5, 9, 12)
    assert [layout.local_shape((rank,)) for rank in range(3)] == [(1, 5), (1, 4), (1, 3)]
    assert shard(filled((4, 3)), layout, (1,)).tolist() == [filled((4, 3)).view(-1)[5:9].tolist()]
    for rank, elements in ((0, "0 to 5"), (1, "5 to 9")):
        with pytest.raises(LayoutError, match=rf"elements {elements} of Layout\(\(4, 3\).* are no box"):
            layout.box((rank,))
    assert layout.box((2,)) == Box((3, 0), (1, 3))


def test_empty_flat_shards_have_zero_rows() -> None:
    layout = over_shard((4, 3), 0, 0, 12, 12)
    assert [layout.local_shape((rank,)) for rank in range(3)] == [(0, 3), (4, 3), (0, 3)]
    assert [layout.box((rank,)).sizes for rank in range(3)] == [(0, 3), (4, 3), (0, 3)]
    assert over_shard((4, 3), 0, 5, 5, 12).local_shape((1,)) == (1, 0), "it lies inside a row"
    assert over_shard((0, 3), 0, 0, 0).local_shape((1,)) == (0, 3)
    assert over_shard((3, 0), 0, 0, 0).local_shape((1,)) == (3, 0)


def test_a_scalar_is_held_by_one_rank_of_a_flat_axis() -> None:
    layout = over_shard((), 0, 0, 1, 1)
    assert [layout.local_shape((rank,)) for rank in range(3)] == [(0,), (), (0,)]
    shards = cut(torch.tensor(7), layout)
    assert [local.tolist() for local in shards.values()] == [[], 7, []]
    assert assemble(shards, layout) == 7


def test_a_flat_axis_cuts_the_shards_of_other_axes() -> None:
    """3 rows of 4 on tp 0, and 2 on tp 1, where the last rank gets what is left."""
    axes, at = {"shard": 2, "tp": 2}, {"shard": Flat((0, 6, 12)), "tp": Shard(0)}
    layout = Layout((5, 4), axes, at)
    assert [layout.region((1, tp)) for tp in range(2)] == [Box((0, 0), (3, 4)), Box((3, 0), (2, 4))]
    assert [layout.interval((1, tp)) for tp in range(2)] == [range(6, 12), range(6, 8)]
    assert [layout.local_shape((s, tp)) for s in range(2) for tp in range(2)] == [
        (1, 6),
        (1, 6),
        (1, 6),
        (1, 2),
    ]
    assert Layout((5, 4), dict(reversed(axes.items())), at).interval((1, 1)) == range(6, 8)


def test_rows_of_other_axes_are_cut_by_rows() -> None:
    layout = Layout((5, 4), {"shard": 2, "tp": 2}, {"shard": Flat((0, 4, 12)), "tp": Shard(0)})
    assert [layout.box(at) for at in layout.coordinates()] == [
        Box((0, 0), (1, 4)),
        Box((3, 0), (1, 4)),
        Box((1, 0), (2, 4)),
        Box((4, 0), (1, 4)),
    ]


def test_columns_of_other_axes_are_cut_by_rows() -> None:
    layout = Layout((4, 6), {"shard": 2, "tp": 2}, {"shard": Flat((0, 6, 12)), "tp": Shard(1)})
    assert layout.box((1, 1)) == Box((2, 3), (2, 3))
    assert torch.equal(shard(filled((4, 6)), layout, (1, 1)), filled((4, 6))[2:, 3:])


def test_without_a_flat_axis_there_is_no_interval() -> None:
    assert UNEVEN.interval((0, 0)) is None
    assert UNEVEN.region((1, 2)) == UNEVEN.box((1, 2))


def test_ranks_along_a_flat_axis_hold_different_elements() -> None:
    axes = {"replicate": 2, "shard": 2, "tp": 2}
    layout = Layout((4,), axes, {"shard": Flat((0, 4, 4))})
    assert layout.replicas((1, 1, 1)) == ((0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1))
    assert layout.owner((1, 1, 1)) == (0, 1, 0)
    assert str(layout).endswith("shard=2: Flat(bounds=(0, 4, 4)), tp=2: Replicate())")
    assert pickle.loads(pickle.dumps(layout)) == layout != Layout((4,), axes, {"shard": Flat((0, 3, 4))})


@pytest.mark.parametrize(
    "bounds", [(), (0,), (0, 12), (0, 6, 9, 12), (1, 6, 12), (0, 7, 6), (-1, 0, 12), (0, -1, 12)]
)
def test_invalid_bounds_of_a_flat_axis_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError) as refusal:
        Layout((4, 3), {"shard": 2}, {"shard": Flat(bounds)})
    assert str(refusal.value) == (
        f"axis 'shard' has 2 ranks and bounds {bounds}: give one bound more than ranks, ascending from 0."
    )


def test_flat_bounds_that_leave_elements_to_no_rank_are_refused() -> None:
    with pytest.raises(LayoutError, match="axis 'shard' has bounds up to 11, but 12 elements are to be cut"):
        over_shard((4, 3), 0, 6, 11)
    axes, at = {"shard": 2, "tp": 2}, {"shard": Flat((0, 6, 11)), "tp": Shard(0)}
    with pytest.raises(LayoutError, match="but 12 elements are to be cut"):
        Layout((5, 4), axes, at)
    assert Layout((5, 4), axes, at | {"tp": Shard(1)}).interval((1, 0)) == range(6, 10)


def test_flat_axes_are_nested() -> None:
    """Of 12 elements shard 0 has 7, which cp cuts into 3 and 4, and shard 1 has 5."""
    at = {"shard": Flat((0, 7, 12)), "cp": Flat((0, 3, 7, 7, 12))}
    layout = Layout((12,), {"shard": 2, "cp": 2}, at)
    assert [layout.interval(where) for where in layout.coordinates()] == [
        range(3),
        range(3, 7),
        range(7, 7),
        range(7, 12),
    ]
    assert [layout.owner(where) for where in layout.coordinates()] == list(layout.coordinates())
    only_outer = Layout((12,), {"shard": 2, "cp": 2}, at | {"cp": Replicate()})
    assert [move.target for move in moves(layout, only_outer)] == [only_outer], "cp is gathered by itself"
    only_inner = moves(layout, Layout((12,), {"shard": 2, "cp": 2}))
    assert [move.axis for move in only_inner] == ["cp", "shard"], "the inner axis is gathered first"


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ((0, 2, 4), "axis 'cp' has 4 ranks and bounds (0, 2, 4): give one bound more than ranks"),
        ((0, 1, 3, 3, 4), "which do not contain those of axis 'shard', (0, 2, 4)"),
    ],
)
def test_refuses_flat_axes_that_are_not_nested(inner: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout((4,), {"shard": 2, "cp": 2}, {"shard": Flat((0, 2, 4)), "cp": Flat(inner)})


@given(flat_layouts(), st.sampled_from(DTYPES))
def test_assembling_flat_shards_gives_the_tensor(layout: Layout, dtype: torch.dtype) -> None:
    tensor = filled(layout.shape, dtype)
    shards = cut(tensor, layout)
    for coordinate, local in shards.items():
        assert tuple(local.shape) == layout.local_shape(coordinate)
        assert local.is_contiguous()
    assert torch.equal(assemble(shards, layout), tensor)


@given(flat_layouts())
def test_sharding_an_assembled_tensor_gives_the_flat_shards(layout: Layout) -> None:
    shards = cut(filled(layout.shape), layout)
    again = cut(assemble(shards, layout), layout)
    assert all(torch.equal(shards[c], again[c]) for c in shards)


@given(flat_layouts(partial=False))
def test_owners_hold_each_element_once(layout: Layout) -> None:
    numbers = torch.arange(prod(layout.shape)).reshape(layout.shape)
    owners = {layout.owner(coordinate) for coordinate in layout.coordinates()}
    held = torch.cat([shard(numbers, layout, owner).view(-1) for owner in owners])
    assert torch.equal(held.sort().values, numbers.view(-1))


@given(flat_layouts(partial=False))
def test_replicas_of_flat_shards_hold_the_same_elements(layout: Layout) -> None:
    shards = cut(filled(layout.shape), layout)
    for coordinate, local in shards.items():
        assert all(torch.equal(local, shards[other]) for other in layout.replicas(coordinate))


@given(flat_layouts(partial=False))
def test_a_flat_shards_box_is_what_the_rank_holds(layout: Layout) -> None:
    tensor = filled(layout.shape)
    for coordinate in layout.coordinates():
        try:
            box = layout.box(coordinate)
        except LayoutError:
            shape = layout.local_shape(coordinate)
            assert layout.blocked_dim is not None or shape[:-1] == (1,) * max(len(layout.shape) - 1, 0)
        else:
            assert box.sizes == layout.local_shape(coordinate)
            assert torch.equal(tensor[box.slices], shard(tensor, layout, coordinate))


@given(flat_layouts(sizes=(0, 1, 2, 3, 4)), st.data())
def test_a_reshaped_flat_shard_has_the_same_elements(layout: Layout, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(factorings(prod(layout.shape))))
    try:
        reshaped = reshape(layout, shape)
    except LayoutError:
        assume(False)
    for coordinate in layout.coordinates():
        local = shard(filled(layout.shape), layout, coordinate).view(-1)
        assert torch.equal(local, shard(filled(shape), reshaped, coordinate).view(-1))


@pytest.mark.parametrize("rows", [1, 3])
def test_flat_shards_of_single_columns_assemble(rows: int) -> None:
    """Their elements stand apart in the memory of the whole."""
    layout = Layout((rows, 2), {"shard": 2, "tp": 2}, {"shard": Flat((0, 1, rows)), "tp": Shard(1)})
    assert torch.equal(assemble(cut(filled((rows, 2)), layout), layout), filled((rows, 2)))
