from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import LayoutError
from plait.plan.layout import (
    Box,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    assemble,
    divide,
    reshape,
    shard,
)

UNEVEN = Layout(shape=(7, 6), axes={"shard": 2, "tp": 3}, placements={"shard": Shard(0), "tp": Shard(0)})
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def layouts(draw: st.DrawFn, partial: bool = True, sizes: tuple[int, ...] = tuple(range(8))) -> Layout:
    """Up to 3 dims over up to 3 axes of 1 to 4 ranks: empty dims, more ranks than rows, copies, blocks."""
    shape = draw(st.lists(st.sampled_from(sizes), max_size=3))
    degrees = draw(st.lists(st.integers(1, 4), max_size=3))
    axes = dict(zip(("replicate", "shard", "tp"), degrees, strict=False))
    kinds: list[Any] = [st.just(Replicate())]
    kinds += [st.just(Partial())] * partial

    def placements(degree: int) -> st.SearchStrategy[Any]:
        if not shape:
            return st.one_of(kinds)
        copies = st.sampled_from([n for n in range(1, degree + 1) if degree % n == 0])
        shards = st.builds(Shard, st.integers(-len(shape), len(shape) - 1), copies)
        return st.one_of(*kinds, shards, shards)

    chosen = {axis: draw(placements(degree)) for axis, degree in axes.items()}
    dims = [placement.dim % len(shape) for placement in chosen.values() if isinstance(placement, Shard)]
    for axis, placement in chosen.items():
        if (
            isinstance(placement, Shard)
            and dims.count(placement.dim % len(shape)) == 1
            and draw(st.booleans())
        ):
            size = shape[placement.dim]
            divisors = [n for n in range(2, 7) if size % n == 0] or [1]
            chosen[axis] = replace(placement, blocks=draw(st.sampled_from(divisors)))
            break
    return Layout(shape, axes, chosen)


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor whose elements differ (as far as the dtype allows) and have varied signs."""
    return (torch.arange(prod(shape)) * 37 % 101 - 50).reshape(shape).to(dtype)


def cut(tensor: Tensor, layout: Layout) -> dict[tuple[int, ...], Tensor]:
    return {coordinate: shard(tensor, layout, coordinate) for coordinate in layout.coordinates()}


class TestDivide:
    def test_an_uneven_division_gives_the_first_ranks_one_more(self) -> None:
        assert divide(10, 3) == (range(0, 4), range(4, 7), range(7, 10))

    def test_more_ranks_than_rows_leave_empty_parts(self) -> None:
        assert [len(part) for part in divide(2, 4)] == [1, 1, 0, 0]

    @given(st.integers(0, 1000), st.integers(1, 40))
    def test_a_division_covers_every_row_once_and_evenly(self, size: int, parts: int) -> None:
        shards = divide(size, parts)
        assert [row for local in shards for row in local] == list(range(size))
        lengths = [len(local) for local in shards]
        assert len(lengths) == parts
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1

    @pytest.mark.parametrize(("size", "parts"), [(-1, 2), (4, 0), (4, -1)])
    def test_an_invalid_division_is_refused(self, size: int, parts: int) -> None:
        with pytest.raises(LayoutError, match=f"divide {size} rows into {parts} parts"):
            divide(size, parts)


class TestLayout:
    def test_two_nested_uneven_axes_give_the_shards_of_the_table(self) -> None:
        rows = [[list(range(7))[UNEVEN.box((s, t)).slices[0]] for t in range(3)] for s in range(2)]
        assert rows == [
            [[0, 1], [2], [3]],
            [[4], [5], [6]],
        ]

    def test_two_axes_over_two_dims_give_four_boxes(self) -> None:
        layout = Layout((5, 3), {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Shard(1)})
        assert [layout.box(c) for c in layout.coordinates()] == [
            Box((0, 0), (3, 2)),
            Box((0, 2), (3, 1)),
            Box((3, 0), (2, 2)),
            Box((3, 2), (2, 1)),
        ]

    def test_the_outer_axis_cuts_first_whatever_the_order_of_the_placements(self) -> None:
        swapped = Layout((7, 6), {"shard": 2, "tp": 3}, {"tp": Shard(0), "shard": Shard(-2)})
        assert swapped == UNEVEN
        assert Layout((7, 6), {"tp": 3, "shard": 2}, {"tp": Shard(0), "shard": Shard(0)}) != UNEVEN

    def test_a_layout_is_hashable_picklable_and_immutable(self) -> None:
        assert hash(copy.deepcopy(UNEVEN)) == hash(UNEVEN)
        assert pickle.loads(pickle.dumps(UNEVEN)) == UNEVEN
        with pytest.raises(AttributeError):
            UNEVEN.shape = (1,)  # type: ignore[misc]

    def test_a_layout_prints_in_one_line(self) -> None:
        layout = Layout((7, 6), {"replicate": 2, "tp": 3}, {"tp": Shard(-1)})
        assert str(layout) == "Layout((7, 6), replicate=2: Replicate(), tp=3: Shard(1))"

    def test_a_coordinate_may_be_named_among_other_axes_of_the_mesh(self) -> None:
        assert UNEVEN.box({"pp": 3, "tp": 2, "shard": 1}) == UNEVEN.box((1, 2))
        assert UNEVEN.local_shape({"tp": 0, "shard": 0}) == (2, 6)

    def test_the_owner_of_a_shard_is_its_first_replica(self) -> None:
        layout = Layout((4,), {"replicate": 2, "shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Partial()})
        assert layout.replicas((1, 1, 1)) == ((0, 1, 1), (1, 1, 1))
        assert layout.owner((1, 1, 1)) == (0, 1, 0)

    def test_replicas_of_a_shard_with_copies_are_on_neighbouring_ranks(self) -> None:
        layout = Layout((5, 3), {"shard": 2, "tp": 4}, {"tp": Shard(0, copies=2)})
        boxes = [layout.box((1, tp)) for tp in range(4)]
        assert boxes == [Box((0, 0), (3, 3))] * 2 + [Box((3, 0), (2, 3))] * 2
        assert layout.replicas((1, 3)) == ((0, 2), (0, 3), (1, 2), (1, 3))
        assert [layout.owner((1, tp)) for tp in range(4)] == [(0, 0), (0, 0), (0, 2), (0, 2)]
        assert layout == Layout((5, 3), {"shard": 2, "tp": 4}, {"tp": Shard(-2, copies=2)})
        assert layout != Layout((5, 3), {"shard": 2, "tp": 4}, {"tp": Shard(0)})
        assert str(layout) == "Layout((5, 3), shard=2: Replicate(), tp=4: Shard(0, copies=2))"

    def test_as_many_copies_as_ranks_are_the_whole(self) -> None:
        layout = Layout((5,), {"tp": 3}, {"tp": Shard(0, copies=3)})
        assert [layout.local_shape((tp,)) for tp in range(3)] == [(5,)] * 3
        assert layout.replicas((2,)) == ((0,), (1,), (2,))

    def test_inner_axes_cut_what_the_copies_of_an_outer_one_hold(self) -> None:
        axes = {"shard": 4, "tp": 2}
        layout = Layout((10,), axes, {"shard": Shard(0, copies=2), "tp": Shard(0)})
        held = [(box.offsets[0], box.sizes[0]) for box in map(layout.box, layout.coordinates())]
        assert held == [(0, 3), (3, 2)] * 2 + [(5, 3), (8, 2)] * 2

    def test_blocks_of_different_sizes_are_cut(self) -> None:
        layout = Layout((2, 12), {"tp": 2}, {"tp": Shard(-1, blocks=(8, 2, 2))})
        assert str(layout) == "Layout((2, 12), tp=2: Shard(1, blocks=(8, 2, 2)))"
        whole = torch.arange(24).view(2, 12)
        assert shard(whole, layout, (1,))[0].tolist() == [4, 5, 6, 7, 9, 11]
        assert layout.local_shape((1,)) == (2, 6)
        assert torch.equal(assemble([shard(whole, layout, where) for where in ((0,), (1,))], layout), whole)
        for blocks in ((8, 2), (9, 3)):
            with pytest.raises(LayoutError, match="give multiples of 2 that add up to 12"):
                Layout((2, 12), {"tp": 2}, {"tp": Shard(-1, blocks=blocks)})

    def test_each_of_several_blocks_is_cut(self) -> None:
        layout = Layout((2, 12), {"tp": 4}, {"tp": Shard(-1, copies=2, blocks=3)})
        assert str(layout) == "Layout((2, 12), tp=4: Shard(1, copies=2, blocks=3))"
        held = [shard(torch.arange(24).view(2, 12), layout, (tp,))[0].tolist() for tp in range(4)]
        assert held == [[0, 1, 4, 5, 8, 9]] * 2 + [[2, 3, 6, 7, 10, 11]] * 2
        assert layout.boxes((3,)) == tuple(Box((0, start), (2, 2)) for start in (2, 6, 10))
        assert layout.sizes((3,)) == layout.local_shape((3,)) == (2, 6)
        assert layout.blocked_dim == 1
        for ask in (layout.box, layout.region):
            with pytest.raises(LayoutError, match="is 3 boxes, not one: call boxes"):
                ask((3,))

    @given(layouts())
    def test_owners_tile_the_global_tensor(self, layout: Layout) -> None:
        hits = torch.zeros(layout.shape, dtype=torch.int64)
        for owner in {layout.owner(c) for c in layout.coordinates()}:
            assert layout.owner(owner) == owner
            for box in layout.boxes(owner):
                hits[box.slices] += 1
        assert torch.equal(hits, torch.ones_like(hits))

    @given(layouts())
    def test_the_owner_is_the_first_with_the_same_box(self, layout: Layout) -> None:
        for coordinate in layout.coordinates():
            boxes = layout.boxes(coordinate)
            if prod(layout.sizes(coordinate)):
                first = next(c for c in layout.coordinates() if layout.boxes(c) == boxes)
                assert layout.owner(coordinate) == first

    @given(layouts())
    def test_replicas_hold_the_same_box_and_agree_on_each_other(self, layout: Layout) -> None:
        for coordinate in layout.coordinates():
            replicas = layout.replicas(coordinate)
            assert coordinate in replicas
            assert all(layout.replicas(r) == replicas for r in replicas)
            assert {layout.boxes(r) for r in replicas} == {layout.boxes(coordinate)}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (((4, -1), {"tp": 2}), r"shape \(4, -1\)"),
            (((4,), {"tp": 0}), "axis 'tp' has 0 ranks"),
            (((4,), {"tp": 2}, {"shard": Shard(0)}), "for axis 'shard', but the axes are tp"),
            (((4,), {"tp": 2}, {"tp": Shard(1)}), r"axis 'tp' shards dim 1 of shape \(4,\)"),
            (((), {"tp": 2}, {"tp": Shard(0)}), r"axis 'tp' shards dim 0 of shape \(\)"),
            (((4,), {"tp": 2}, {"tp": Shard(-2)}), r"axis 'tp' shards dim -2 of shape \(4,\)"),
            (((4,), {"tp": 4}, {"tp": Shard(0, 3)}), "axis 'tp' has 4 ranks, which cannot hold 3 copies of"),
            (
                ((4,), {"tp": 2}, {"tp": Shard(0, 4)}),
                "4 copies of each shard: give a divisor of 2",
            ),
            (((4,), {"tp": 2}, {"tp": Shard(0, 0)}), "cannot hold 0 copies"),
            (((4,), {"tp": 2}, {"tp": Shard(0, -1)}), "cannot hold -1 copies"),
            (
                ((4,), {"tp": 2}, {"tp": Shard(0, 1, 3)}),
                r"3 equal blocks of dim 0 .* 4 rows: give a divisor of 4",
            ),
            (((4,), {"tp": 2}, {"tp": Shard(0, 1, 0)}), "0 equal blocks"),
            (
                ((4,), {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Shard(0, 1, 2)}),
                "the blocks of a dim over several axes",
            ),
            (
                ((4, 4), {"shard": 2, "tp": 2}, {"shard": Shard(0, 1, 2), "tp": Shard(1, 1, 2)}),
                "has blocks in several dims",
            ),
        ],
    )
    def test_contradictory_layouts_are_refused(self, arguments: Any, message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            Layout(*arguments)

    @pytest.mark.parametrize("where", [(0,), (0, 3), (-1, 0), (0, 0, 0), {"shard": 0}, {"shard": 2, "tp": 0}])
    def test_coordinates_outside_the_mesh_are_refused(self, where: Any) -> None:
        with pytest.raises(LayoutError, match="is no coordinate of Layout"):
            UNEVEN.box(where)


class TestShards:
    @given(layouts(), st.sampled_from(DTYPES))
    def test_assembling_the_shards_gives_the_tensor(self, layout: Layout, dtype: torch.dtype) -> None:
        tensor = filled(layout.shape, dtype)
        shards = cut(tensor, layout)
        for coordinate, local in shards.items():
            assert tuple(local.shape) == layout.local_shape(coordinate)
            assert local.dtype == dtype
        for given_as in (shards, list(shards.values()), dict(reversed(shards.items()))):
            whole = assemble(given_as, layout)
            assert whole.dtype == dtype
            assert torch.equal(whole, tensor)

    @given(layouts())
    def test_sharding_an_assembled_tensor_gives_the_shards(self, layout: Layout) -> None:
        shards = cut(filled(layout.shape), layout)
        again = cut(assemble(shards, layout), layout)
        assert all(torch.equal(shards[c], again[c]) for c in shards)

    @given(layouts(), st.data())
    def test_a_shard_of_another_shape_is_refused(self, layout: Layout, data: st.DataObject) -> None:
        shards = cut(filled(layout.shape), layout)
        victim = data.draw(st.sampled_from(sorted(shards)))
        shards[victim] = torch.zeros((*shards[victim].shape, 2), dtype=torch.int64)
        with pytest.raises(LayoutError, match="give the shard that shard"):
            assemble(shards, layout)

    @given(layouts(sizes=(1, 2, 3, 5)), st.data())
    def test_a_replica_that_drifted_is_refused(self, layout: Layout, data: st.DataObject) -> None:
        shards = cut(filled(layout.shape), layout)
        copies = [c for c in shards if shards[c].numel() and len(layout.replicas(c)) > 1]
        assume(copies)
        victim = data.draw(st.sampled_from(copies))
        shards[victim].view(-1)[-1] += 1
        with pytest.raises(LayoutError, match=r"the replicas at .* differ"):
            assemble(shards, layout)
        whole = assemble(shards, layout, check_replicas=False)
        assert torch.equal(whole, filled(layout.shape)) == (victim != layout.replicas(victim)[0])

    def test_partial_tensors_are_added_in_rank_order(self) -> None:
        layout = Layout((1,), {"tp": 3}, {"tp": Partial()})
        large, small = torch.tensor([1e16], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
        assert assemble([large, small, -large], layout).item() == 0.0
        assert assemble([large, -large, small], layout).item() == 1.0

    def test_a_shard_is_a_detached_contiguous_copy(self) -> None:
        tensor = torch.nn.Parameter(torch.ones(4, 6))
        for placement in (Replicate(), Shard(1), Partial()):
            layout = Layout((4, 6), {"tp": 2}, {"tp": placement})
            local = shard(tensor, layout, (0,))
            assert local.is_contiguous()
            assert not local.requires_grad
            local.zero_()
            assert not assemble([tensor[layout.box((i,)).slices] for i in (0, 1)], layout).requires_grad
        assert torch.equal(tensor, torch.ones(4, 6))

    def test_equal_replicas_may_hold_nan(self) -> None:
        shards = [torch.tensor([float("nan"), 1.0])] * 2
        assert torch.isnan(assemble(shards, Layout((2,), {"tp": 2}))[0])

    def test_meta_tensors_can_be_sharded(self) -> None:
        local = shard(torch.empty(7, 6, device="meta"), UNEVEN, (0, 0))
        assert local.device.type == "meta"
        assert local.shape == (2, 6)

    def test_errors_of_shard_and_assemble_name_what_is_wrong(self) -> None:
        shards = cut(filled((7, 6)), UNEVEN)
        with pytest.raises(LayoutError, match=r"shape \(6, 7\) cannot be sharded"):
            shard(filled((6, 7)), UNEVEN, (0, 0))
        with pytest.raises(LayoutError, match=r"5 shards .* one per rank, 6 in all"):
            assemble(list(shards.values())[:5], UNEVEN)
        with pytest.raises(LayoutError, match=r"shard at \(0, 1\) .* is missing"):
            assemble({c: p for c, p in shards.items() if c != (0, 1)}, UNEVEN)
        with pytest.raises(LayoutError, match=r"shard at \(2, 0\) .* is not one of its coordinates"):
            assemble({**shards, (2, 0): shards[0, 0]}, UNEVEN)
        with pytest.raises(LayoutError, match=r"\(shard=1, tp=2\) is \(1, 6\) in torch.float32"):
            assemble({**shards, (1, 2): shards[1, 2].float()}, UNEVEN)


def over_tp(shape: tuple[int, ...], dim: int, degree: int = 2) -> Layout:
    return Layout(shape, {"tp": degree}, {"tp": Shard(dim)})


class TestReshape:
    @pytest.mark.parametrize(
        ("layout", "shape", "expected"),
        [
            (over_tp((2, 5, 12), 2), (2, 5, 4, 3), 2),  # heads out of a hidden dim
            (over_tp((2, 5, 4, 3), 2), (2, 5, 12), 2),  # and back
            (over_tp((2, 5, 12), 2), (10, 12), 1),  # flatten batch and sequence
            (over_tp((10, 5), 0, 3), (10, 5, 1), 0),  # uneven, but unchanged
            (over_tp((9, 4), 0, 3), (36,), 0),
            (over_tp((10, 4), 1, 3), (2, 5, 4), 2),
            (over_tp((1, 4), 1), (4,), 0),
            (over_tp((4,), 0), (1, 4), 1),
            (over_tp((6,), 0, 1), (1, 6), 1),
            (over_tp((0, 4), 1), (0, 2, 2), 1),
            (over_tp((0, 4), 0), (0,), 0),
        ],
    )
    def test_reshaping_a_layout_keeps_the_sharded_dim(
        self, layout: Layout, shape: tuple[int, ...], expected: int
    ) -> None:
        assert reshape(layout, shape) == over_tp(shape, expected, *layout.degrees)

    def test_reshaping_moves_nested_axes_together_or_to_separate_dims(self) -> None:
        nested = Layout((12,), {"shard": 2, "tp": 3}, {"shard": Shard(0), "tp": Shard(0)})
        assert reshape(nested, (6, 2)).placements == (Shard(0), Shard(0))
        assert reshape(nested, (2, 6)).placements == (Shard(0), Shard(1))
        assert reshape(reshape(nested, (2, 6)), (12,)) == nested

    def test_reshaping_keeps_copies_of_a_shard(self) -> None:
        layout = Layout((12, 5), {"tp": 4}, {"tp": Shard(0, copies=2)})
        assert reshape(layout, (2, 6, 5)).placements == (Shard(0, copies=2),)
        assert reshape(layout, (60,)).placements == (Shard(0, copies=2),)
        assert reshape(reshape(layout, (4, 3, 5)), (12, 5)) == layout

    def test_reshaping_moves_copies_with_their_axis(self) -> None:
        layout = Layout((12,), {"shard": 2, "tp": 6}, {"shard": Shard(0), "tp": Shard(0, copies=2)})
        assert reshape(layout, (2, 6)).placements == (Shard(0), Shard(1, copies=2))

    def test_reshaping_keeps_blocks_with_their_dim(self) -> None:
        layout = Layout((4, 6, 5), {"tp": 2}, {"tp": Shard(1, blocks=3)})
        assert reshape(layout, (2, 2, 6, 5)).placements == (Shard(2, blocks=3),)
        with pytest.raises(LayoutError, match="while a dim of several blocks is sharded"):
            reshape(layout, (4, 3, 2, 5))

    def test_reshaping_keeps_replicate_and_partial(self) -> None:
        layout = Layout((6, 2), {"replicate": 2, "tp": 2}, {"tp": Partial()})
        assert reshape(layout, (3, 4)).placements == (Replicate(), Partial())

    @pytest.mark.parametrize(
        ("layout", "shape"),
        [
            (over_tp((10, 6), 0, 3), (60,)),  # merged, but uneven
            (over_tp((4, 6), 1), (24,)),  # merged, but not the outermost
            (over_tp((12,), 0), (3, 4)),  # split, but 3 does not divide
            (over_tp((6, 1, 4), 1), (6, 4)),  # the sharded dim is gone
        ],
    )
    def test_reshaping_that_would_move_shards_between_ranks_is_refused(
        self, layout: Layout, shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(LayoutError) as refusal:
            reshape(layout, shape)
        for part in (layout.shape, shape, "axis 'tp'", f"{layout.degrees[0]} shards"):
            assert str(part) in str(refusal.value)

    @pytest.mark.parametrize("shape", [(41,), (-7, -6), (0,)])
    def test_reshaping_to_another_number_of_elements_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(LayoutError, match=r"cannot reshape \(7, 6\) to .* as many elements"):
            reshape(UNEVEN, shape)

    @given(layouts(sizes=(0, 1, 2, 3, 4, 6)), st.data())
    def test_the_shard_of_a_reshaped_tensor_is_the_reshaped_shard(
        self, layout: Layout, data: st.DataObject
    ) -> None:
        shape = data.draw(st.sampled_from(factorings(prod(layout.shape))))
        tensor = filled(layout.shape)
        try:
            reshaped = reshape(layout, shape)
        except LayoutError:
            assume(False)
        for coordinate in layout.coordinates():
            local = shard(tensor, layout, coordinate).reshape(reshaped.local_shape(coordinate))
            assert torch.equal(local, shard(tensor.reshape(shape), reshaped, coordinate))

    @given(layouts(partial=False, sizes=(2, 3, 4, 6)), st.data())
    def test_reshaping_is_refused_only_where_no_layout_exists(
        self, layout: Layout, data: st.DataObject
    ) -> None:
        assume(layout.blocked_dim is None)  # blocks may turn into a dim, which `reshape` does not look for
        shape = data.draw(st.sampled_from([f for f in factorings(prod(layout.shape)) if 1 not in f]))
        numbers = torch.arange(prod(shape))
        held = list(cut(numbers.reshape(layout.shape), layout).values())
        try:
            reshape(layout, shape)
        except LayoutError:
            axes = dict(zip(layout.axes, layout.degrees, strict=True))
            places: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
            for choice in product(places, repeat=len(axes)):
                other = Layout(shape, axes, dict(zip(axes, choice, strict=True)))
                would = cut(numbers.reshape(shape), other).values()
                assert not all(torch.equal(a.view(-1), b.view(-1)) for a, b in zip(held, would, strict=True))


def factorings(count: int) -> list[tuple[int, ...]]:
    """Shapes of up to 3 dims with `count` elements."""
    sizes = [size for size in range(1, count + 1) if count % size == 0] or [0, 1, 2, 3]
    return [shape for dims in range(4) for shape in product(sizes, repeat=dims) if prod(shape) == count]
