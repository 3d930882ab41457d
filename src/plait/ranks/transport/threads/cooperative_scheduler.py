"""Cooperative scheduling of rank threads: one runs at a time, in a fixed order; deadlocks are detected.

Whenever a rank waits, the lowest rank that can continue does. So every run has the same order, ranks print in
order between two collectives, and when no rank can continue the error lists which rank waits for which.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class DeadlockError(RuntimeError):
    """No rank can continue; the message lists which rank waits for which."""


class PeerEndedError(RuntimeError):
    """A rank waits for another one that has returned or failed."""


@dataclass(frozen=True)
class WaitCondition:
    """The condition that a rank waits for: a description, whether it is met, and the ranks still missing."""

    awaited: str
    """Completes "rank 1 waits for ..."."""
    ready: Callable[[], bool]
    missing: Callable[[], Sequence[int]]
    """Returns the ranks that it still depends on."""


class CooperativeScheduler:
    """Runs one of `size` threads at a time. Each calls `begin` first, `end` last and `wait` in between."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._resume = [threading.Semaphore(0) for _ in range(size)]
        self._waits: dict[int, WaitCondition] = {}
        self._ended: set[int] = set()
        self._timed_out: set[int] = set()
        """Ranks whose wait timed out while another rank ran: they run beside the others, to their end."""
        self._paused: dict[int, None] = {}
        """Ranks that wait for an event outside of all ranks, the oldest first."""
        self._running = 0
        self._deadlock: str | None = None
        self._all_ended = threading.Event()

    def run(self) -> None:
        """Run rank 0, and block until all ranks have ended."""
        self._resume[0].release()
        self._all_ended.wait()

    def begin(self, rank: int) -> None:
        """Block the calling thread until the scheduler runs `rank` for the first time."""
        self._resume[rank].acquire()
        self._running = rank

    def end(self, rank: int) -> None:
        """Mark this rank as ended and run the next one."""
        self._ended.add(rank)
        if len(self._ended) == self.size:
            self._all_ended.set()
        elif rank not in self._timed_out and (next_rank := self._next()) is not None:
            self._resume[next_rank].release()

    def wait(self, rank: int, condition: WaitCondition, timeout: float) -> None:
        """Run other ranks until `condition` is met and no rank with a lower number can continue.

        Raises `DeadlockError` when no rank can continue, `PeerEndedError` when a missing one has ended, and
        `TimeoutError` when another rank has run for `timeout` seconds without a wait.
        """
        if not condition.ready():
            self._raise_if_impossible(condition)
        if rank in self._timed_out:
            raise TimeoutError(f"rank {rank} timed out before")
        self._waits[rank] = condition
        next_rank = self._next()
        if next_rank is not None and next_rank != rank:
            self._switch(rank, next_rank, timeout)
        del self._waits[rank]
        if not condition.ready():
            self._raise_if_impossible(condition)
            raise DeadlockError(self._deadlock)

    def _switch(self, rank: int, next_rank: int, timeout: float) -> None:
        states = torch.get_rng_state(), random.getstate()
        self._resume[next_rank].release()
        if not self._resume[rank].acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            self._timed_out.add(rank)
            raise TimeoutError(f"rank {self._running} has run for {timeout:g} s without waiting for anything")
        self._running = rank
        torch.set_rng_state(states[0])
        random.setstate(states[1])

    def cancel(self, reason: str) -> None:
        """Make each rank's next wait that is not met raise `DeadlockError` with `reason`."""
        self._deadlock = reason

    def pause(self, rank: int, seconds: float) -> None:
        """Run the other ranks until each of them waits, then sleep; used to poll for external events."""
        self._paused[rank] = None
        next_rank = self._next()
        if next_rank is not None and next_rank != rank:
            self._switch(rank, next_rank, threading.TIMEOUT_MAX)
        del self._paused[rank]
        time.sleep(seconds)

    def _raise_if_impossible(self, condition: WaitCondition) -> None:
        ended = [rank for rank in condition.missing() if rank in self._ended]
        if ended:
            raise PeerEndedError(f"rank {' and '.join(map(str, ended))} ended before it took part")

    def _next(self) -> int | None:
        """Return the rank to run next: the lowest number that can continue, else the one paused for longest.

        Else the lowest one left, which raises `DeadlockError`; None if all have ended.
        """
        alive = [rank for rank in range(self.size) if rank not in self._ended | self._timed_out]
        able = next((rank for rank in alive if rank not in self._paused and self._can_continue(rank)), None)
        if able is None:
            able = next(iter(self._paused), None)
        if able is None and alive:
            self._deadlock = self._deadlock or self._describe_cycle(alive)
            able = alive[0]
        return able

    def _can_continue(self, rank: int) -> bool:
        condition = self._waits.get(rank)
        if condition is None or condition.ready() or self._deadlock is not None:
            return True
        return not self._ended.isdisjoint(condition.missing())

    def _describe_cycle(self, blocked: Sequence[int]) -> str:
        """Describe the cycle of waiting ranks that the lowest-numbered blocked rank is in, or leads to."""
        chain: list[int] = []
        rank = min(blocked)
        while rank not in chain:
            chain.append(rank)
            rank = next((other for other in self._waits[rank].missing() if other in self._waits), rank)
        cycle = chain[chain.index(rank) :]
        waits = ", ".join(f"rank {each} waits for {self._waits[each].awaited}" for each in cycle)
        return f"deadlock: {waits}"
