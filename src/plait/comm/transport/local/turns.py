"""Which of several ranks runs: threads of one process take turns, and a deadlock is known at once.

A rank runs until it waits for another, then the next one that can go on does, in rank order. So a run is the
same each time, prints come in order of ranks, and when no rank can go on the cycle of who waits for whom is
the report.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class DeadlockError(RuntimeError):
    """No rank can go on: the text says who waits for whom."""


class PeerEndedError(RuntimeError):
    """What a rank waits for cannot come: the rank that it should come from has returned or failed."""


@dataclass(frozen=True)
class Wait:
    """What a rank waits for."""

    awaited: str
    """Completes "rank 1 waits for ..."."""
    ready: Callable[[], bool]
    missing: Callable[[], Sequence[int]]
    """The ranks that have not done their part yet."""


class Turns:
    """Gives `size` threads their turns. Each calls `begin` first and `end` last, and `wait` in between."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._waits: dict[int, Wait] = {}
        self._ended: set[int] = set()
        self._without_turn: set[int] = set()
        """Ranks whose wait timed out while another rank ran: they only run to their end."""
        self._running = 0
        self._deadlock: str | None = None
        self._random_states: dict[int, tuple[torch.Tensor, Any]] = {}
        self._all_ended = threading.Event()

    def start(self) -> None:
        """Give rank 0 its turn."""
        self._go[0].release()

    def begin(self, rank: int) -> None:
        """Block until it is this rank's first turn."""
        self._go[rank].acquire()
        self._running = rank

    def end(self, rank: int) -> None:
        """This rank has returned or failed: the next one runs."""
        self._ended.add(rank)
        if len(self._ended) == self.size:
            self._all_ended.set()
        elif rank not in self._without_turn:
            self._pass_on(rank)

    def join(self) -> None:
        """Block until all ranks have ended."""
        self._all_ended.wait()

    def wait(self, rank: int, wait: Wait, timeout: float) -> None:
        """Let the other ranks run until `wait` is ready.

        Raises `DeadlockError` when no rank can go on, `PeerEndedError` when a missing one has ended, and
        `TimeoutError` when another rank has run for `timeout` seconds without waiting for anything.
        """
        if wait.ready():
            return
        self._raise_if_impossible(wait)
        if rank in self._without_turn:
            raise TimeoutError(f"rank {rank} timed out before")
        self._waits[rank] = wait
        self._save_random_state(rank)
        self._pass_on(rank)
        if not self._go[rank].acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            self._without_turn.add(rank)
            raise TimeoutError(f"rank {self._running} has run for {timeout:g} s without waiting for anything")
        self._running = rank
        self._restore_random_state(rank)
        del self._waits[rank]
        if not wait.ready():
            self._raise_if_impossible(wait)
            raise DeadlockError(self._deadlock)

    def cancel(self, reason: str) -> None:
        """Let every rank fail at its next wait."""
        self._deadlock = reason

    def pause(self, rank: int, seconds: float) -> None:
        """Let the other ranks run for a while: what is waited for happens outside of all ranks."""
        wait = Wait("what happens outside of the ranks", lambda: True, lambda: ())
        self._waits[rank] = wait
        self._save_random_state(rank)
        self._pass_on(rank)
        self._go[rank].acquire()
        del self._waits[rank]
        self._running = rank
        self._restore_random_state(rank)
        threading.Event().wait(seconds)

    def _raise_if_impossible(self, wait: Wait) -> None:
        ended = [rank for rank in wait.missing() if rank in self._ended]
        if ended:
            raise PeerEndedError(f"rank {' and '.join(map(str, ended))} ended before it took part")

    def _pass_on(self, rank: int) -> None:
        """Give the next rank that can go on its turn, in cyclic order; where none can, one raises."""
        others = [(rank + step) % self.size for step in range(1, self.size + 1)]
        alive = [other for other in others if other not in self._ended | self._without_turn]
        able = [other for other in alive if self._can_go_on(other)]
        if not able and alive:
            self._deadlock = self._deadlock or self._cycle(alive)
            able = sorted(alive)
        if able:
            self._go[able[0]].release()

    def _can_go_on(self, rank: int) -> bool:
        wait = self._waits.get(rank)
        if wait is None or wait.ready() or self._deadlock is not None:
            return True
        return any(missing in self._ended for missing in wait.missing())

    def _cycle(self, blocked: Sequence[int]) -> str:
        """Who waits for whom, from the lowest blocked rank round to the first that is met again."""
        chain: list[int] = []
        rank = min(blocked)
        while rank not in chain:
            chain.append(rank)
            rank = next((other for other in self._waits[rank].missing() if other in self._waits), rank)
        cycle = chain[chain.index(rank) :]
        told = ", ".join(f"rank {each} waits for {self._waits[each].awaited}" for each in cycle)
        return f"deadlock: {told}"

    def _save_random_state(self, rank: int) -> None:
        self._random_states[rank] = torch.get_rng_state(), random.getstate()

    def _restore_random_state(self, rank: int) -> None:
        torch_state, python_state = self._random_states[rank]
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
