"""A data-parallel rank's rows of a batch, and the number of tokens in a batch."""

from __future__ import annotations

from plait.app.data.batches import Batches, rank_rows, row_total
from plait.app.loop.stream_reader import Source
from plait.errors import DataError
from plait.ranks.mesh import Mesh
from plait.tensor.layer_values import Value, tensors_of


def require_batches(batches: object) -> None:
    """Raise `DataError` for other objects than batches."""
    if not (hasattr(batches, "size") and hasattr(batches, "batch")):
        has_state = isinstance(batches, Source)
        remedy = "plait.Stream of it" if has_state else "plait.Loader of the dataset"
        raise DataError(
            f"batches are an object of {type(batches).__name__}, without size and batch(step, rows): give a "
            f"{remedy}."
        )


def require_divisible(batches: Batches, mesh: Mesh) -> slice:
    """Return this data-parallel rank's rows of a global batch, which all ranks must be able to divide.

    Raises `DataError` for other objects than batches, and where ranks cannot share one.
    """
    require_batches(batches)
    return rank_rows(mesh.index("dp"), mesh.size("dp"), batches.size)


def repeated_rows(batches: Batches) -> str:
    """Return a warning where a batch has more rows than the data, or ""."""
    rows = row_total(batches)
    if not rows or batches.size <= rows:
        return ""
    return (
        f"WARNING: a batch has {batches.size} rows, and rows come again after {rows}: some are in a batch "
        "more than once."
    )


def uneven_epochs(batches: Batches, steps: int) -> str:
    """Return a note, as text, if the last epoch is cut so that some rows are used once more; else ""."""
    rows, size = row_total(batches), batches.size
    epochs, more = divmod(steps * size, rows) if rows else (0, 0)
    if not rows or not epochs or not more:
        return ""
    return (
        f"Data: {steps} steps of {size} rows are {steps * size / rows:.3g} epochs of {rows} rows: {more} of "
        f"them are taken {epochs + 1} times, the others {epochs}."
    )


def token_count(targets: Value, rows: int) -> int:
    """Return the number of tokens of a global batch, from `rows` and the length of `targets`; else `rows`."""
    first = next(iter(tensors_of(targets)), None)
    return rows if first is None or first.dim() < 2 else rows * first.shape[1]
