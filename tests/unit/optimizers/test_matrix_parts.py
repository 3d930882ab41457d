"""Boxes of parameters and the matrices in them."""

from __future__ import annotations

import pytest
import torch

from plait.optimizers import matrix_parts
from plait.optimizers.matrix_parts import MatrixPart, batches_of, divided_matrix, row_blocks
from plait.optimizers.newton_schulz import iteration_cost
from plait.plan.layout.layout import Box

OUT, IN = 12, 5


def test_blocks_of_rows_are_parts_of_one_matrix_each() -> None:
    weight = torch.arange(OUT * IN).view(OUT, IN)
    first, second = divided_matrix((), (OUT, IN), [8, 4])
    assert (first.box, second.box) == (Box((0, 0), (8, IN)), Box((8, 0), (4, IN)))
    assert (first.shapes, second.shapes) == (((8, IN),), ((4, IN),))
    assert second.split(weight[second.box.slices])[0].equal(weight[8:])


def test_transposed_blocks_are_columns_and_their_matrices_have_out_features_first() -> None:
    weight = torch.arange(OUT * IN).view(IN, OUT)
    _, second = divided_matrix((), (IN, OUT), [8, 4], transposed=True)
    assert (second.box, second.shapes) == (Box((0, 8), (IN, 4)), ((4, IN),))
    assert second.split(weight[second.box.slices])[0].equal(weight.mT[8:])


def test_a_matrix_of_an_expert_lies_at_the_place_of_the_expert() -> None:
    weight = torch.arange(3 * OUT * IN).view(3, OUT, IN)
    gate, up = divided_matrix((2,), (OUT, IN), [OUT // 2] * 2)
    assert (gate.box, up.box) == (Box((2, 0, 0), (1, 6, IN)), Box((2, 6, 0), (1, 6, IN)))
    assert up.split(weight[up.box.slices])[0].equal(weight[2, 6:])


def test_rows_that_alternate_make_up_several_matrices() -> None:
    weight = torch.arange(OUT * IN).view(OUT, IN)
    [part] = divided_matrix((), (OUT, IN), [OUT], (1, 3))
    assert part.shapes == ((3, IN), (9, IN))
    first, second = part.split(weight)
    assert first.equal(weight[[0, 4, 8]])
    assert second.equal(weight[[1, 2, 3, 5, 6, 7, 9, 10, 11]])
    assert part.cost == iteration_cost(3, IN) + iteration_cost(9, IN)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sections", [(12,), (1, 1), (2, 4), (1, 1, 1)], ids=str)
def test_joined_matrices_are_the_values_that_were_split(sections: tuple[int, ...], transposed: bool) -> None:
    sizes = (1, IN, OUT) if transposed else (1, OUT, IN)
    values = torch.randn(sizes)
    part = MatrixPart(Box((0, 0, 0), sizes), sections, transposed)
    matrices = part.split(values)
    assert tuple(tuple(one.shape) for one in matrices) == part.shapes
    assert part.join([one.clone() for one in matrices]).equal(values)


def of_expert(number: int, rows: int, *sections: int) -> MatrixPart:
    return MatrixPart(Box((number, 0, 0), (1, rows, 4)), sections or (rows,))


def test_matrices_of_equal_shapes_are_orthogonalized_together_up_to_a_number_of_elements() -> None:
    parts = [*(of_expert(number, 2) for number in range(5)), of_expert(5, 6), of_expert(6, 2, 1, 1)]
    parts.append(of_expert(7, 6))
    assert batches_of(range(8), parts) == [[0, 1, 2, 3, 4], [5, 7], [6]]
    assert batches_of([0, 1, 2, 4, 5, 7], parts, most=16) == [[0, 1], [2, 4], [5], [7]]


@pytest.mark.parametrize(
    ("shape", "rows"), [((OUT, IN), [4, 4, 4]), ((1, 7, 9), [2, 2, 2, 1]), ((2, 30), [1, 1])]
)
def test_blocks_of_rows_are_views_of_few_elements(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], rows: list[int]
) -> None:
    monkeypatch.setattr(matrix_parts, "BLOCK_ELEMENTS", 20)
    values, sums = torch.rand(shape), torch.zeros(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    sizes = []
    for block, total in row_blocks(values, sums):
        sizes.append(block.shape[-2])
        total += block
    assert sizes == rows
    assert sums.equal(values)
