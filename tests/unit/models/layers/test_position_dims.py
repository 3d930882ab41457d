from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.proof.position_dims import OperationCall, PositionDim, positions_by_size

LENGTH = 5


def positions_in(shape: tuple[int, ...], at: PositionDim) -> torch.Tensor:
    """The position that each element belongs to."""
    of_dim = torch.arange(LENGTH).repeat_interleave(at.inner).repeat(at.outer)
    return of_dim.view(-1, *[1] * (len(shape) - at.dim - 1)).expand(shape)


@given(st.data())
def test_a_view_finds_the_positions_if_one_dim_has_them(data: st.DataObject) -> None:
    sizes = [*data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3))]
    outer, inner = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2]))
    dim = data.draw(st.integers(0, len(sizes)))
    old = (*sizes[:dim], outer * LENGTH * inner, *sizes[dim:])
    at = PositionDim(dim, outer, inner)
    factors = data.draw(st.permutations([LENGTH, *(f for f in (*sizes, outer, inner) if f > 1), 1]))
    groups = data.draw(st.lists(st.integers(0, len(factors)), max_size=3).map(sorted))
    edges = [0, *groups, len(factors)]
    new = tuple(prod(factors[a:b]) for a, b in pairwise(edges))
    expected = positions_in(old, at).reshape(new)
    found = at.viewed(old, new, LENGTH)
    candidates = [
        PositionDim(dim, before, size // before // LENGTH)
        for dim, size in enumerate(new)
        for before in range(1, size // LENGTH + 1)
        if size % (before * LENGTH) == 0
    ]
    right = [one for one in candidates if torch.equal(positions_in(new, one), expected)]
    assert ([] if found is None else [found]) == right


def test_a_view_that_mixes_rows_and_positions_has_no_position_dim() -> None:
    assert PositionDim(1).viewed((3, 5, 4), (15, 4), 5) == PositionDim(0, outer=3)
    assert PositionDim(1).viewed((3, 5, 4), (3, 5, 2, 2), 5) == PositionDim(1)
    assert PositionDim(1).viewed((3, 5, 4), (3, 20), 5) == PositionDim(1, inner=4)
    assert PositionDim(0, outer=3).viewed((15, 4), (5, 3, 4), 5) is None
    assert PositionDim(1).viewed((3, 5, 4), (3, 4, 5), 5) is None


def test_broadcasting_aligns_positions_from_the_right() -> None:
    x, row, mask, other = torch.ones(3, 5, 4), torch.ones(5, 1), torch.ones(4), torch.ones(5)
    positions = {id(x): PositionDim(1), id(row): PositionDim(0), id(other): PositionDim(0)}
    call = OperationCall("mul", {}, (3, 5, 4), 5, positions)
    assert call.aligned([x, row, mask], 3) == PositionDim(1)
    assert call.aligned([row, mask], 2) == PositionDim(0)
    assert call.aligned([x, other], 3) is None
    assert call.aligned([x, torch.ones(2, 1)], 3) is None
    assert call.aligned([mask], 1) is None
    assert call.aligned([x, torch.ones(3, 1, 1)], 3) == PositionDim(1)


def test_the_position_dim_is_found_by_its_size() -> None:
    shapes = {(4, 5): (1, 1, 1), (15, 4): (0, 3, 1), (30,): (0, 3, 2), (10, 2): (0, 1, 2)}
    for shape, expected in shapes.items():
        assert positions_by_size(shape, 5, rows=3) == [PositionDim(*expected)]
    assert positions_by_size((5, 1, 5), 5, rows=3) == [PositionDim(0), PositionDim(2)]
    assert [positions_by_size(shape, 5, rows=3) for shape in ((), (0, 4), (7, 1))] == [[], [], []]
    for dim, outer, inner in product(range(2), (1, 2), (1, 3)):
        shape = [4, 4]
        shape[dim] = outer * 5 * inner
        assert PositionDim(dim, outer, inner).fits(shape, 5)
        assert not PositionDim(1 - dim, outer, inner).fits(shape, 5)
        assert not PositionDim(2).fits(shape, 5)
