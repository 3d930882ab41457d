"""`StreamReader`: the batches of an iterable source in its own order, and the position in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import default_collate

from plait.app.data.loader import kept_random_state, seed_all
from plait.errors import DataError
from plait.ranks.json_serialization import NotPlainError, decode, encode
from plait.tensor.microbatches import row_count
from plait.tensor.nested_values import Value

Collate = Callable[[Any], Any]
_END = object()
"""In place of a sample behind the last one."""


@runtime_checkable
class Source(Protocol):
    """An iterable of samples that can save its position, such as a streamed data set of Hugging Face."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator from the position that was loaded on, else from the beginning."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator made last, as values that `load_state_dict` takes."""

    def load_state_dict(self, state: Any, /) -> None:
        """Set the position at which the next iterator starts."""


class ReadBatch(NamedTuple):
    """A global batch that was read from the source."""

    value: tuple[Value, Value]
    """Inputs and targets."""
    left: int | None
    """None where batches follow; of the last one the samples behind it, which fill no batch."""


class StreamReader:
    """Reads batches of samples from an iterable source, epoch after epoch; used on one rank."""

    def __init__(
        self,
        source: Source,
        size: int,
        seed: int,
        collate: Collate | None,
        of_batches: bool,
        epochs: int | None,
    ) -> None:
        """`of_batches`: the source yields batches, which `collate`, if any, changes; else samples."""
        self._source, self._size, self._seed, self._epochs = source, size, seed, epochs
        self._collate, self._of_batches = collate, of_batches
        self._epoch = self._samples = self._number = 0
        self._items = self._read()
        self._pending: list[Any] = []
        self._ahead: tuple[Value, Value] | None = None
        self._position: str | None = None

    def next(self) -> ReadBatch:
        """Return the next batch. Raises `DataError` where the source or `collate` fails, and at the end."""
        value = self._take() if self._ahead is None else self._ahead
        if value is None:
            raise DataError(
                f"the source has {len(self._pending)} more samples in {self._epochs} epochs, and a batch has "
                f"{self._size}: give smaller batches, or more data."
            )
        self._ahead = self._position = None
        if self._epochs is None:
            return ReadBatch(value, None)
        self._position = self._now()
        self._ahead = self._take()
        return ReadBatch(value, len(self._pending) if self._ahead is None else None)

    def state(self) -> str:
        """Return the position after the last batch, as JSON text."""
        return self._now() if self._position is None else self._position

    def load(self, state: str) -> None:
        """Go on from the position `state`. Raises DataError where the source refuses it."""
        found = decode(state)
        self._epoch, self._samples, self._number = found["epoch"], found["samples"], found["number"]
        self._ahead = self._position = None
        if _has_shuffle_buffer(self._source):
            self._read_again(found["samples"])
            return
        self._set_epoch()
        try:
            self._source.load_state_dict(found["source"])
        except Exception as error:  # of the user's own
            raise self._failed("load_state_dict of the source", error) from error
        self._items = self._read()

    def _read_again(self, samples: int) -> None:
        """Skip the first `samples` of an epoch, which were used before, by reading them again."""
        self._samples, self._items = 0, self._read()
        for _ in range(samples):
            if self._next_item() is _END:
                return

    def _now(self) -> str:
        try:
            position = self._source.state_dict()
        except Exception as error:  # of the user's own
            raise self._failed("state_dict of the source", error) from error
        numbers = {"epoch": self._epoch, "samples": self._samples, "number": self._number}
        try:
            return encode({**numbers, "source": position})
        except NotPlainError as error:
            raise DataError(
                f"the source's state_dict holds an object of {error}, and a checkpoint holds numbers, text, "
                "bytes, tensors and containers of them: leave it out there."
            ) from None

    def _take(self) -> tuple[Value, Value] | None:
        """Return the next batch; None at the end of the last epoch."""
        with kept_random_state():
            seed_all(self._seed, self._number)
            self._pending = []
            while len(self._pending) < (1 if self._of_batches else self._size):
                if (item := self._next_item()) is _END:
                    return None
                self._pending.append(item)
            value = self._collated()
        self._number += 1
        return value

    def _next_item(self) -> Any:
        """Return the next sample or batch of the source; `_END` after the last epoch."""
        try:
            return next(self._items, _END)
        except DataError:
            raise
        except Exception as error:  # of the user's own
            raise self._failed("the source", error) from error

    def _collated(self) -> tuple[Value, Value]:
        try:
            if self._of_batches:
                found = self._pending[0] if self._collate is None else self._collate(self._pending[0])
            else:
                found = (self._collate or default_collate)(self._pending)
        except Exception as error:  # of the user's own
            raise self._failed("collate", error) from error
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                f"a batch of the stream is an object of {type(found).__name__}, not inputs and targets: give "
                "the stream a collate that returns (inputs, targets)."
            )
        rows = row_count(found, "inputs and targets of the stream")
        if rows != self._size:
            raise DataError(
                f"a batch of the stream has {rows} rows, and the stream's batch is {self._size}: give a "
                "source of batches of that size, or one of samples."
            )
        return found[0], found[1]

    def _read(self) -> Iterator[Any]:
        """Yield the samples or batches of the source, from its current position on."""
        while self._epochs is None or self._epoch < self._epochs:
            self._set_epoch()
            for item in self._source:
                self._samples += 1
                yield item
            if not self._samples:
                raise DataError(
                    f"the source has no samples in epoch {self._epoch + 1}: its __iter__ has to begin anew "
                    "where it has ended, or give the stream fewer epochs."
                )
            self._epoch, self._samples = self._epoch + 1, 0

    def _set_epoch(self) -> None:
        """Give the source, or the data set of a loader, the number of the epoch, by which it may shuffle."""
        for one in (self._source, getattr(self._source, "dataset", None)):
            set_epoch = getattr(one, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
                return

    def _failed(self, what: str, error: Exception) -> DataError:
        name = type(self._source).__name__
        return DataError(
            f"{what} of the stream ({name}) raised {type(error).__name__} at batch {self._number + 1}: "
            f"{' '.join(str(error).split())[:300]}"
        )


def _has_shuffle_buffer(source: Any) -> bool:
    """Return whether a data set shuffles in a buffer, whose content its `state_dict` does not have."""
    data = getattr(source, "dataset", source)
    step = getattr(data, "_ex_iterable", None)
    while step is not None:
        if type(step).__name__.startswith("BufferShuffled"):
            return True
        step = getattr(step, "ex_iterable", None)
    return False
