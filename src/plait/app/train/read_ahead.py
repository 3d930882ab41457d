"""Batches that a thread reads while a step runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from plait.app.data.batches import Batches, InputsAndTargets, description, row_total


class ReadAhead:
    """Wrapper of `batches` that reads the next step's batch in a thread while a step runs.

    Not for threads that ask at the same time.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        """The batches that are read."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="plait-read-ahead")
        self._next: tuple[tuple[int, int, int], Future[InputsAndTargets]] | None = None

    @property
    def size(self) -> int:
        """The number of rows of a global batch."""
        return self.batches.size

    @property
    def rows(self) -> int | None:
        """The number of rows of the batches; None for endless ones."""
        return row_total(self.batches)

    def describe(self) -> dict[str, Any]:
        """Return the description of the batches."""
        return description(self.batches)

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, and start to read the same rows of the next one."""
        known, key = self._next, _key(step, rows)
        made = known[1].result() if known is not None and known[0] == key else self.batches.batch(step, rows)
        following = step + 1
        self._next = _key(following, rows), self._reader.submit(self.batches.batch, following, rows)
        return made

    def close(self) -> None:
        """End the thread."""
        self._reader.shutdown(cancel_futures=True)


def _key(step: int, rows: slice) -> tuple[int, int, int]:
    return step, rows.start or 0, -1 if rows.stop is None else rows.stop
