"""`Loader`: batches of any map-style dataset, whose order depends on the seed and the step only."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from plait.app.data.batches import permute, rank_rows
from plait.errors import DataError
from plait.plan.argument_checks import require_choice, require_flag, require_whole

Collate = Callable[[list[Any]], Any]
Context = Literal["fork", "forkserver", "spawn"]


class Loader:
    """Global batches of `batch` samples of a dataset, shuffled anew in each epoch, for `plait.fit`.

    Any step's batch can be made directly: nothing has to be saved or replayed to resume, on any number of
    ranks. Each rank reads its own rows only. Epochs follow each other without a gap, so that a batch between
    two epochs has samples of both. A validation takes each sample once: its last batch may be smaller.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        batch: int,
        seed: int = 0,
        collate: Collate = default_collate,
        shuffle: bool = True,
        workers: int = 0,
        ahead: int = 2,
        context: Context | None = None,
    ) -> None:
        """Load `batch` samples a step, over all ranks together.

        `collate` returns (inputs, targets) of a list of samples. `workers`: processes of each rank that read
        `ahead` steps each beforehand; with 0, and where ranks are threads, the rank itself reads. `context`:
        how workers are started; None: as `multiprocessing` is set. Random numbers that the dataset draws from
        torch, numpy or random depend on the seed and the sample's number in the run only. Raises `DataError`
        for a dataset without `len` or without samples.
        """
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"the dataset is {_article(type(dataset).__name__)} without a length or without samples by "
                "number: give a map-style dataset, with __len__ and __getitem__, or plait.Stream an iterable "
                "with state_dict."
            )
        if not len(dataset):
            raise DataError("a loader has a dataset of 0 samples: give at least one.")
        require_whole("a loader's batch", batch, DataError, least=1)
        require_whole("a loader's seed", seed, DataError, least=0)
        require_whole("a loader's workers", workers, DataError, least=0)
        require_whole("a loader's ahead", ahead, DataError, least=1)
        require_flag("a loader's shuffle", shuffle, DataError)
        if context is not None:
            require_choice("a loader's context", context, get_args(Context), DataError)
        if not callable(collate):
            raise DataError(f"a loader's collate is {collate!r}: give a function of a list of samples.")
        self.size = batch
        """Rows of a global batch."""
        self.rows = len(dataset)
        """Samples of the dataset: rows of an epoch."""
        self._samples = _Samples(dataset, len(dataset), batch, seed, collate, shuffle)
        self._workers, self._ahead, self._context = workers, ahead, context
        self._next: tuple[int, int, int] | None = None  # the step and rows that `_reader` gives next
        self._reader: Iterator[Any] = iter(())

    def batch(self, step: int, rows: slice) -> tuple[Any, Any]:
        """Return (inputs, targets) of `rows` of the global batch of `step`, counted from 0.

        With workers, consecutive steps of the same rows are read ahead; any other step starts them anew.
        Raises `DataError` where `collate` returns something else than a pair.
        """
        start, stop, _ = rows.indices(self.size)
        if not self._workers or threading.current_thread() is not threading.main_thread():
            with kept_random_state():
                return self._samples.take(step, start, stop)
        if self._next != (step, start, stop):
            self.close()
            self._reader = self._read_from(step, start, stop)
        result: tuple[Any, Any] = next(self._reader)
        self._next = step + 1, start, stop
        return result

    def share(self, step: int, rank: int, ranks: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of a step for data-parallel rank `rank` of `ranks`: its rows only.

        Raises `DataError` where the ranks cannot share a batch equally.
        """
        return self.batch(step, rank_rows(rank, ranks, self.size))

    def steps(self, epochs: float = 1) -> int:
        """Return the number of steps after which each sample was in `epochs` epochs, rounded up.

        The last of them goes on with samples of the next epoch, where `batch` does not divide the samples.
        """
        return math.ceil(epochs * self._samples.count / self.size)

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine each step's samples; a run resumes only with equal ones."""
        return {"samples": self._samples.count, "seed": self._samples.seed, "shuffle": self._samples.shuffle}

    def order(self, step: int, rows: slice = slice(None)) -> list[int]:
        """Return the dataset's indices of `rows` of the global batch of `step`."""
        start, stop, _ = rows.indices(self.size)
        return [int(index) for index in self._samples.places(step, start, stop)[0]]

    def close(self) -> None:
        """Stop this rank's worker processes."""
        self._next, self._reader = None, iter(())

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_next": None, "_reader": iter(())}

    def _read_from(self, step: int, start: int, stop: int) -> Iterator[tuple[Any, Any]]:
        loader: DataLoader[Any] = DataLoader(
            _Rows(self._samples, start, stop),
            batch_size=None,
            sampler=itertools.count(step),
            num_workers=self._workers,
            prefetch_factor=self._ahead,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # the rank's own state stays as it is
            multiprocessing_context=self._context,
        )
        return iter(loader)


class _Samples:
    """The samples of a dataset in the order of training, collated; the same in workers and in ranks."""

    def __init__(
        self, dataset: Any, count: int, size: int, seed: int, collate: Collate, shuffle: bool
    ) -> None:
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._dataset, self._size, self._collate = dataset, size, collate

    def places(self, step: int, start: int, stop: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the dataset's indices of rows `start` … `stop` of a step, and their numbers in the run."""
        numbers = step * self._size + np.arange(start, stop, dtype=np.int64)
        epoch, position = np.divmod(numbers, self.count)
        indices = permute(position, self.count, self.seed, epoch) if self.shuffle else position
        return indices, numbers

    def take(self, step: int, start: int, stop: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of rows `start` … `stop` of a step; seeds random number generators."""
        samples = []
        for index, number in zip(*self.places(step, start, stop), strict=True):
            seed_all(self.seed, int(number))
            samples.append(self._dataset[int(index)])
        result = self._collate(samples)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise DataError(
                f"collate returned {_article(type(result).__name__)}, not inputs and targets: give the "
                "dataset samples of two parts, or the loader a collate that returns (inputs, targets)."
            )
        return result[0], result[1]


class _Rows(Dataset[Any]):
    """Dataset of a rank's rows of each step, indexed by the step's number."""

    def __init__(self, samples: _Samples, start: int, stop: int) -> None:
        self._samples, self._start, self._stop = samples, start, stop

    def __getitem__(self, step: int) -> tuple[Any, Any]:
        assert get_worker_info() is not None, "only workers may change the state of random numbers"
        return self._samples.take(step, self._start, self._stop)


def _unchanged(value: Any) -> Any:
    return value


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def seed_all(seed: int, number: int) -> None:
    """Seed torch, numpy and random for one row or batch of the run."""
    word = int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])
    torch.manual_seed(word)
    random.seed(word)
    np.random.seed(word % 2**32)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager that restores the states of torch's, numpy's and Python's random numbers on the CPU."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
