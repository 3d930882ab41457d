"""The time of Muon's step beyond that of reading and writing memory: iterations, and exchanges of matrices.

to the owners of matrices, an all-to-all    iterations on each owner    back, an all-to-all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.operation_times import AxisTransfer, Product, operation_seconds

ITERATIONS, ITEM = 5, 2
"""Iterations of Newton–Schulz, and bytes of an element in them: Muon's defaults, in bf16."""


class StageMatrices(NamedTuple):
    """Muon's multiplications and exchanged elements on a stage's most loaded rank."""

    shapes: Mapping[tuple[int, int], int]
    """How many matrices with these out and in features the rank orthogonalizes whose work is most."""
    exchanged: tuple[int, int]
    """Elements that a rank sends or receives in the two all-to-alls."""


def matrix_seconds(timer: LayerTimer, matrices: StageMatrices) -> tuple[float, float]:
    """Return the seconds of all iterations on the most loaded rank of a stage, and of both all-to-alls."""
    precision = "bf16" if "bf16" in timer.hardware.peak else timer.precision
    computing = 0.0
    for shape, count in matrices.shapes.items():
        least, most = sorted(shape)
        products = Product(least, least, most), Product(least, least, least), Product(least, most, least)
        each = sum(operation_seconds(one, timer.hardware, precision, ITEM) for one in products)
        computing += ITERATIONS * count * each
    ranks = timer.network.groups["stage"].size
    transfers = (AxisTransfer("all-to-all", "stage", ITEM * ranks * one) for one in matrices.exchanged)
    return computing, sum(map(timer.network.seconds, transfers))
