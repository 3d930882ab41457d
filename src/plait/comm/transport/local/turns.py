"""Which of several ranks runs: threads of one process take turns, and a deadlock is known at once.

Whenever a rank waits, the lowest rank that can go on does. So a run is the same each time, what ranks print
between two collectives comes in order of ranks, and when none can go on the report is who waits for whom.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        self._paused: dict[int, None] = {}
        """Ranks that wait for what happens outside of all ranks, the oldest first."""
        self._running = 0
        self._deadlock: str | None = None
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
        elif rank not in self._without_turn and (next_rank := self._next()) is not None:
            self._go[next_rank].release()

    def join(self) -> None:
        """Block until all ranks have ended."""
        self._all_ended.wait()

    def wait(self, rank: int, wait: Wait, timeout: float) -> None:
        """Return when `wait` is ready, and no lower rank can go on; other ranks run meanwhile.

        Raises `DeadlockError` when no rank can go on, `PeerEndedError` when a missing one has ended, and
        `TimeoutError` when another rank has run for `timeout` seconds without waiting for anything.
        """
        if not wait.ready():
            self._raise_if_impossible(wait)
        if rank in self._without_turn:
            raise TimeoutError(f"rank {rank} timed out before")
        self._waits[rank] = wait
        next_rank = self._next()
        if next_rank is not None and next_rank != rank:
            self._switch(rank, next_rank, timeout)
        del self._waits[rank]
        if not wait.ready():
            self._raise_if_impossible(wait)
            raise DeadlockError(self._deadlock)

    def _switch(self, rank: int, next_rank: int, timeout: float) -> None:
        """Give another rank the turn, and block until this one gets it back."""
        states = torch.get_rng_state(), random.getstate()
        self._go[next_rank].release()
        if not self._go[rank].acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            self._without_turn.add(rank)
            raise TimeoutError(f"rank {self._running} has run for {timeout:g} s without waiting for anything")
        self._running = rank
        torch.set_rng_state(states[0])
        random.setstate(states[1])

    def cancel(self, reason: str) -> None:
        """Let every rank fail at its next wait."""
        self._deadlock = reason

    def pause(self, rank: int, seconds: float) -> None:
        """Let the others run until each waits, then sleep: for what happens outside of all ranks."""
        self._paused[rank] = None
        next_rank = self._next()
        if next_rank is not None and next_rank != rank:
            self._switch(rank, next_rank, threading.TIMEOUT_MAX)
        del self._paused[rank]
        time.sleep(seconds)

    def _raise_if_impossible(self, wait: Wait) -> None:
        ended = [rank for rank in wait.missing() if rank in self._ended]
        if ended:
            raise PeerEndedError(f"rank {' and '.join(map(str, ended))} ended before it took part")

    def _next(self) -> int | None:
        """The lowest rank that can go on; else that which has paused the longest; else one that raises."""
        alive = [rank for rank in range(self.size) if rank not in self._ended | self._without_turn]
        able = next((rank for rank in alive if rank not in self._paused and self._can_go_on(rank)), None)
        if able is None:
            able = next(iter(self._paused), None)
        if able is None and alive:
            self._deadlock = self._deadlock or self._cycle(alive)
            able = alive[0]
        return able

    def _can_go_on(self, rank: int) -> bool:
        wait = self._waits.get(rank)
        if wait is None or wait.ready() or self._deadlock is not None:
            return True
        return not self._ended.isdisjoint(wait.missing())

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
