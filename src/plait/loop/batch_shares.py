"""A data-parallel rank's rows of a batch, and the number of tokens in a batch."""

from __future__ import annotations

from plait.comm.mesh import Mesh
from plait.data.batches import Batches, rank_rows
from plait.errors import DataError
from plait.layers.nested import Value, tensors_of


def require_divisible(batches: Batches, mesh: Mesh) -> slice:
    """Return this data-parallel rank's rows of a batch.

    Raises `DataError` for other objects than batches, and where ranks cannot share one.
    """
    if not (hasattr(batches, "size") and hasattr(batches, "batch")):
        raise DataError(
            f"batches are an object of {type(batches).__name__}, without size and batch(step, rows): give a "
            "plait.Loader of the dataset."
        )
    return rank_rows(mesh.index("dp"), mesh.size("dp"), batches.size)


def token_count(targets: Value, rows: int) -> int:
    """Return the tokens of a global batch of `rows`, of which `targets` are a part; or its rows."""
    first = next(iter(tensors_of(targets)), None)
    return rows if first is None or first.dim() < 2 else rows * first.shape[1]
