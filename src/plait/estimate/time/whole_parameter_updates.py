"""The time that updates of whole parameters (`Muon`, `Owned`) add to a step: iterations, exchanges.

to the owners, an all-to-all    iterations, or updates, on each owner    back, an all-to-all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.operation_times import AxisTransfer, Product, operation_seconds
from plait.plan.parameter_units import PRECISIONS, Dtype

MatrixCounts = Mapping[tuple[int, int], float]
"""How many matrices with these out and in features a rank orthogonalizes."""


class StageOwners(NamedTuple):
    """Work of an optimizer of whole parameters (Muon, or one within `Owned`) on the ranks of a stage."""

    shapes: Sequence[MatrixCounts]
    """The matrices of each rank."""
    exchanged: tuple[float, float]
    """Bytes that a rank sends or receives in the two all-to-alls, at most."""
    updated: float = 0.0
    """Bytes that the owner reads and writes which has most to update."""
    iterations: int = 0
    """Of Newton–Schulz."""
    dtype: Dtype = PRECISIONS["bf16"]
    """In which matrices are orthogonalized."""


def owner_seconds(timer: LayerTimer, stage: StageOwners) -> tuple[float, float]:
    """Return the seconds of whole parameters' updates on a stage's slowest rank, and of their all-to-alls.

    Updates include the iterations of Newton–Schulz. Raises ConfigError where the hardware's rate of products
    in the dtype of the iterations is not known.
    """
    hardware, network = timer.hardware, timer.network
    precision: str = next(name for name, dtype in PRECISIONS.items() if dtype == stage.dtype)
    if precision == "bf16" and precision not in hardware.peak:
        precision = timer.precision
    known: dict[tuple[int, int], float] = {}
    for shape in {shape for counts in stage.shapes for shape in counts}:
        least, most = sorted(shape)
        products = Product(least, least, most), Product(least, least, least), Product(least, most, least)
        known[shape] = sum(
            operation_seconds(one, hardware, precision, stage.dtype.itemsize) for one in products
        )
    each = (sum(count * known[shape] for shape, count in counts.items()) for counts in stage.shapes)
    part = hardware.efficiency
    bandwidth = hardware.memory_bandwidth * part.memory * part.optimizer
    computing = stage.iterations * max(each, default=0.0) + stage.updated / bandwidth
    ranks = network.groups["stage"].size
    transfers = (AxisTransfer("all-to-all", "stage", ranks * nbytes) for nbytes in stage.exchanged)
    return computing, sum(map(network.seconds, transfers))
