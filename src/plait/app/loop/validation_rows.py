"""`ValidationRows`: the rows that a validation takes, each once, and a data-parallel rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.app.data.batches import Batches, description, row_total
from plait.app.loop.batch_shares import require_batches
from plait.app.loop.stream import RankStream, Stream
from plait.errors import DataError


class RowShare(NamedTuple):
    """The rows of one validation batch that a data-parallel rank evaluates."""

    batch: int
    rows: slice
    """Within the batch; a rank without any takes one that does not count, to run with the others."""
    counted: bool
    """Whether they count."""


@dataclass(frozen=True)
class ValidationRows:
    """The first rows of `batches`: all where their number is known, or those of `limit` batches."""

    batches: Batches
    limit: int | None = None
    """The most batches; None: all, or one where the data name no number of rows."""

    def __post_init__(self) -> None:
        if isinstance(self.batches, Stream | RankStream):
            raise DataError(
                "the validation data are a plait.Stream, whose rows come once, and each validation needs the "
                "same: "
                "give a plait.Loader of a list of some of its samples."
            )
        require_batches(self.batches)
        if self.total == 0:
            raise DataError("the validation data have 0 rows: give at least one, or no validation.")

    @property
    def total(self) -> int | None:
        """The number of rows of the data; None for endless data."""
        return row_total(self.batches)

    @property
    def count(self) -> int:
        """The number of rows that are taken."""
        if self.total is None:
            return self.batches.size * (self.limit or 1)
        return self.total if self.limit is None else min(self.total, self.limit * self.batches.size)

    @property
    def selection(self) -> str:
        """Text that says which rows are used; "" for all."""
        if self.total is not None:
            return f"the first {self.count} of {self.total} rows" if self.count < self.total else ""
        batches = "batch" if self.limit in (None, 1) else f"{self.limit} batches"
        unknown = ", since the data have no number of `rows`" if self.limit is None else ""
        return f"the first {batches}, {self.count} rows{unknown}"

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine which rows are used, as JSON values."""
        described = description(self.batches) | {"validated_rows": self.count}
        if self.total is not None:
            del described["size"]  # the rows are the same in batches of any size
        return described

    def shares(self, rank: int, ranks: int) -> Iterator[RowShare]:
        """Yield the rows of data-parallel rank `rank` of each batch; shares differ by one row at most."""
        size = self.batches.size
        for number, first in enumerate(range(0, self.count, size)):
            rows = min(size, self.count - first)
            begin, end = rank * rows // ranks, (rank + 1) * rows // ranks
            is_empty = begin == end
            yield RowShare(number, slice(0, 1) if is_empty else slice(begin, end), not is_empty)
