"""Which matrices Muon orthogonalizes together."""

from __future__ import annotations

from plait.optimizers.matrix_parts import MatrixPart
from plait.optimizers.muon import batches_of
from plait.plan.layout.layout import Box


def part(number: int, rows: int, *sections: int) -> MatrixPart:
    return MatrixPart(Box((number, 0, 0), (1, rows, 4)), sections or (rows,))


def test_matrices_of_equal_shapes_are_orthogonalized_together_up_to_a_number_of_elements() -> None:
    parts = [*(part(number, 2) for number in range(5)), part(5, 6), part(6, 2, 1, 1), part(7, 6)]
    assert batches_of(range(8), parts) == [[0, 1, 2, 3, 4], [5, 7], [6]]
    assert batches_of([0, 1, 2, 4, 5, 7], parts, most=16) == [[0, 1], [2, 4], [5], [7]]
