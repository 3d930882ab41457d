from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding_cases import SHAPES

from plait.plan.flat_buffer_specs import ALIGNMENT, MOST_PADDING, Offsets, compute_offsets

SHARDS = st.integers(1, 7)


def placed(shapes: list[tuple[int, ...]], shards: int) -> Offsets:
    return compute_offsets({str(number): torch.Size(shape) for number, shape in enumerate(shapes)}, shards)


def row_of(shape: tuple[int, ...]) -> int:
    return max(1, prod(shape[1:]))


def cuts_between_rows(offsets: Offsets) -> bool:
    return all(
        bound % row_of(slot.shape) == 0 for slot in offsets.slots for bound in offsets.bounds(slot)[1:-1]
    )


def padding(offsets: Offsets) -> int:
    return offsets.size - sum(slot.shape.numel() for slot in offsets.slots)


def starts(offsets: Offsets) -> dict[str, int]:
    return {slot.name: slot.start for slot in offsets.slots}


def test_cuts_fall_between_rows_where_that_costs_nothing() -> None:
    offsets = placed([(64, 64), (128, 64)], shards=4)
    assert (offsets.size, offsets.shard_size, starts(offsets)) == (12_288, 3072, {"0": 0, "1": 4096})
    first, second = offsets.slots
    assert offsets.bounds(first) == (0, 3072, 4096, 4096, 4096)
    assert offsets.bounds(second) == (0, 0, 2048, 5120, 8192)


def test_parameters_with_long_rows_come_first_in_a_buffer() -> None:
    """A parameter that starts at multiples of its row, behind rows that it divides, leaves no gap."""
    offsets = placed([(640,), (10, 64), (10, 128)], shards=2)
    assert starts(offsets) == {"2": 0, "1": 1280, "0": 1920}
    assert (offsets.size, padding(offsets)) == (2560, 0)


def test_padding_stands_before_what_would_begin_inside_a_row() -> None:
    offsets = placed([(1000, 48), (1000, 32)], shards=2)
    assert starts(offsets) == {"0": 0, "1": 48_000}
    offsets = placed([(1001, 48), (1000, 32)], shards=2)
    assert starts(offsets) == {"0": 0, "1": 48_064}  # 1001 · 48 = 48 048 is no multiple of 32
    assert cuts_between_rows(offsets)


def test_where_rows_would_cost_too_much_cuts_fall_at_multiples_of_16() -> None:
    offsets = placed([(4, 16), (8, 32), (16,)], shards=2)
    assert (offsets.size, starts(offsets)) == (352, {"0": 0, "1": 64, "2": 320})
    assert [offsets.bounds(slot) for slot in offsets.slots] == [(0, 64, 64), (0, 112, 256), (0, 0, 16)]


def test_for_one_rank_matrices_stand_before_vectors_each_in_their_order() -> None:
    offsets = placed([(), (1,), (17,), (2, 3), ()], shards=1)
    assert starts(offsets) == {"0": 16, "1": 32, "2": 48, "3": 0, "4": 80}
    assert offsets.size == 96
    assert [offsets.bounds(slot) for slot in offsets.slots] == [(0, 1), (0, 1), (0, 17), (0, 6), (0, 1)]


def test_more_ranks_than_elements_leave_empty_shards() -> None:
    offsets = placed([(3,)], shards=4)
    assert (offsets.shard_size, offsets.bounds(offsets.slots[0])) == (16, (0, 3, 3, 3, 3))


@given(SHAPES, SHARDS)
def test_offsets_are_aligned_and_do_not_overlap(shapes: list[tuple[int, ...]], shards: int) -> None:
    offsets = placed(shapes, shards)
    assert sorted(slot.name for slot in offsets.slots) == sorted(map(str, range(len(shapes))))
    assert all(slot.shape == shapes[int(slot.name)] for slot in offsets.slots)
    assert all(slot.start % ALIGNMENT == 0 for slot in offsets.slots)
    in_order = sorted(offsets.slots, key=lambda slot: (slot.start, slot.stop))
    assert all(before.stop <= after.start for before, after in pairwise(in_order))
    assert in_order[-1].stop <= offsets.size


@given(SHAPES, SHARDS)
def test_all_shards_of_a_buffer_have_one_size(shapes: list[tuple[int, ...]], shards: int) -> None:
    offsets = placed(shapes, shards)
    assert offsets.shards == shards
    assert offsets.size == shards * offsets.shard_size
    assert offsets.shard_size % ALIGNMENT == 0


@given(SHAPES, SHARDS)
def test_bounds_tile_each_parameter_as_shards_cut_the_buffer(
    shapes: list[tuple[int, ...]], shards: int
) -> None:
    offsets = placed(shapes, shards)
    for slot in offsets.slots:
        bounds = offsets.bounds(slot)
        assert (len(bounds), bounds[0], bounds[-1]) == (shards + 1, 0, slot.shape.numel())
        holder = [rank for rank, (low, high) in enumerate(pairwise(bounds)) for _ in range(low, high)]
        elements = range(slot.start, slot.start + slot.shape.numel())
        assert holder == [element // offsets.shard_size for element in elements]


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([1, 3, 16, 48, 64, 100])), min_size=1, max_size=5
    ),
    st.integers(2, 6),
)
def test_padding_is_small_or_of_multiples_of_16(shapes: list[tuple[int, int]], shards: int) -> None:
    offsets = placed(shapes, shards)
    by_rows = padding(offsets) <= MOST_PADDING * sum(map(prod, shapes)) and cuts_between_rows(offsets)
    assert by_rows or padding(offsets) < ALIGNMENT * (len(shapes) + shards)


@pytest.mark.parametrize("shards", [2, 3, 4, 6, 8])
def test_the_layers_of_real_models_are_cut_between_rows(shards: int) -> None:
    for hidden in (768, 1024, 4096):
        require_cuts_between_rows(hidden, shards)


def require_cuts_between_rows(hidden: int, shards: int) -> None:
    attention = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,), (hidden,)]
    inner = [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,), (hidden,)]
    for shapes in (attention, inner, [(50_257, hidden)]):
        offsets = placed(shapes, shards)
        assert cuts_between_rows(offsets)
        assert padding(offsets) <= MOST_PADDING * sum(map(prod, shapes))
