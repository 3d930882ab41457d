"""Last words: what a rank waited for when an operation of it failed, left where all ranks can read it.

When a rank dies, only those who wait for it notice. They end in turn, others notice that, and so on: most
would blame a rank that only did the same. So whoever fails first says whom it waited for, in the store where
the ranks of the world met, and then follows what others have said to those who said nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_PAUSE = 0.01
_LONGER = 3.0
"""Seconds of patience where several say nothing: most of them will still notice what has happened."""
_LONGEST = 8.0
"""Seconds from the first failed operation of a rank until it has its account, at most."""
_SHARE = 0.1
"""The same as a share of the timeout: who gave up after a short one has not long to ask either."""


class Store(Protocol):
    """What is used of a store of `torch.distributed`."""

    def add(self, key: str, amount: int, /) -> int:
        """The sum of all that was added under `key`."""

    def check(self, keys: list[str], /) -> bool:
        """Whether there are values under all keys."""

    def get(self, key: str, /) -> bytes:
        """The value under `key`."""

    def set(self, key: str, value: str, /) -> None:
        """Put a value under `key`."""


@dataclass(frozen=True)
class Words:
    """`awaited` completes "rank 1 waited for ...", `suspects` are the ranks that it could have come from.

    `silent` are those who ended it all, as far as this rank could find out; None while it has not asked yet.
    """

    awaited: str
    suspects: tuple[int, ...]
    silent: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Account:
    """What was found out: the words of others on the way, and who is suspected and said nothing."""

    said: Mapping[int, Words]
    silent: tuple[int, ...]


class LastWords:
    """One rank's access to the last words of all, within one mesh. While all is well nothing is said.

    All waits for the store after the first failure share one deadline: a store whose host is gone, or cut
    off, never answers, and each wait for it would come on top of the timeout that has already passed.
    """

    def __init__(self, store: Store, rank: int, timeout: float = 600.0) -> None:
        """All ranks make as many, in the same order. `timeout` is the mesh's, in seconds."""
        self.rank = rank
        self._budget = min(_LONGEST, _SHARE * timeout)
        self._deadline: float | None = None
        self._answers = True
        self._store = store
        self._place = f"plait/{store.add(f'plait/{rank}', 1)}"
        self._mine: Words | None = None

    def say(self, awaited: str, suspects: tuple[int, ...]) -> None:
        """Leave these words; only the first count."""
        if self._mine is None:
            self._mine = Words(awaited, suspects)
            self._leave(self._mine)

    def left(self) -> float:
        """Seconds until the deadline that all waits after this rank's first failure share."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._budget
        return max(0.0, self._deadline - time.monotonic())

    def ask(self, suspects: tuple[int, ...], patience: float) -> Account:
        """Who of the suspects, or of those that they suspect, says nothing within `patience` seconds.

        It takes less where all that are suspected have spoken, or another rank has asked before: then what
        came of that counts. Longer, while several say nothing; never beyond the deadline.
        """
        account = Account({}, suspects)
        longest = 0.8 * self.left()  # what is left then is for this rank's own answer
        if self._answers:
            found = self._within(self.left(), lambda: self._ask(suspects, patience, longest))
            account = found or account
        if self._mine is not None and self._mine.silent is None:
            self._mine = Words(self._mine.awaited, self._mine.suspects, account.silent)
            self._leave(self._mine)
        return account

    def _ask(self, suspects: tuple[int, ...], patience: float, longest: float) -> Account:
        begun = time.monotonic()
        while True:
            account = self._follow(suspects)
            waited_for = {rank for words in account.said.values() for rank in words.silent or ()}
            if waited_for & set(account.silent):
                return Account(account.said, tuple(sorted(waited_for & set(account.silent))))
            patient = patience if len(account.silent) < 2 else max(patience, _LONGER)
            if not account.silent or time.monotonic() - begun > min(patient, longest):
                return account
            time.sleep(_PAUSE)

    def _follow(self, suspects: tuple[int, ...]) -> Account:
        """From each to those whom it suspects, as far as words lead."""
        said: dict[int, Words] = {}
        silent: list[int] = []
        waiting = list(suspects)
        while waiting:
            rank = waiting.pop(0)
            if rank == self.rank or rank in said or rank in silent:
                continue
            words = self._of(rank)
            if words is None:
                silent.append(rank)
            else:
                said[rank] = words
                waiting += words.suspects if words.silent is None else words.silent
        return Account(said, tuple(sorted(silent)))

    def _of(self, rank: int) -> Words | None:
        key = f"{self._place}/{rank}"
        if not self._store.check([key]):
            return None
        awaited, suspects, silent = json.loads(self._store.get(key))
        return Words(awaited, tuple(suspects), None if silent is None else tuple(silent))

    def _leave(self, words: Words) -> None:
        text = json.dumps([words.awaited, words.suspects, words.silent])
        if self._answers:
            self._within(self.left(), lambda: self._store.set(f"{self._place}/{self.rank}", text))

    def _within(self, seconds: float, function: Callable[[], T]) -> T | None:
        """What `function` gives within that time; None, now and ever after, once the store did not answer."""
        results: list[T] = []

        def call() -> None:
            with suppress(RuntimeError, ValueError, OSError):  # the store is gone: nobody can be asked
                results.append(function())

        thread = threading.Thread(target=call, name="plait-last-words", daemon=True)
        thread.start()
        thread.join(seconds)
        self._answers = bool(results)
        return results[0] if results else None


def of_world(rank: int, timeout: float) -> LastWords | None:
    """Those of the initialised world; None where it has no store. torch has no public way to it."""
    try:
        return LastWords(dist.distributed_c10d._get_default_store(), rank, timeout)
    except (RuntimeError, ValueError):
        return None


def ended_by(ranks: Iterable[int]) -> str:
    """The ranks in words: `rank 1 or 3`."""
    return f"rank {' or '.join(map(str, ranks))}"
