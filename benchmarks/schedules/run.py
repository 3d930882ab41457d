"""How fast schedules are made and simulated, and how short they are beside the named policies.

.venv/bin/python benchmarks/schedules/run.py [--large]

One process, one thread. Makespans are exact and the same on every machine; seconds are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar

import plait
from plait.errors import ScheduleError
from plait.schedules.search.schedule_by_policy import POLICY_NAMES

T = TypeVar("T")
COSTS = plait.Costs(F=1, I=1, W=0.9, comm=0.1)
ROUNDS = 3
LENGTHS = ((4, 8, 4), (4, 8, 5), (8, 24, 8), (8, 24, 10), (8, 64, 8), (8, 64, 10))
"""Ranks, micro-batches, limit."""
SEARCHES = ((4, 8), (8, 64), (16, 128))
LARGE = ((32, 256),)


def timed(action: Callable[[], T], rounds: int = ROUNDS) -> tuple[T, float]:
    """What `action` gives, and its median seconds."""
    seconds = []
    for _ in range(rounds):
        start = perf_counter()
        result = action()
        seconds.append(perf_counter() - start)
    return result, median(seconds)


def lengths() -> None:
    """The makespan of each policy within each limit."""
    print("| ranks × micro-batches, limit | " + " | ".join(POLICY_NAMES) + " | bound |")
    print("|---" * (len(POLICY_NAMES) + 2) + "|")
    for ranks, microbatches, limit in LENGTHS:
        cells, bound = [], 0.0
        for policy in POLICY_NAMES:
            try:
                made = plait.schedule(
                    policy, ranks=ranks, microbatches=microbatches, costs=COSTS, limit=limit
                )
            except ScheduleError:
                cells.append("–")
                continue
            cells.append(f"{plait.simulate(made, COSTS).makespan:.2f}")
            bound = made.bound or bound
        print(f"| {ranks} × {microbatches}, {limit} | {' | '.join(cells)} | {bound:.2f} |")


def searches(sizes: tuple[tuple[int, int], ...], rounds: int) -> None:
    """Seconds of `auto` within 1f1b's memory."""
    for ranks, microbatches in sizes:
        made, seconds = timed(
            lambda size=(ranks, microbatches): plait.schedule(
                "auto", ranks=size[0], microbatches=size[1], costs=COSTS
            ),
            rounds,
        )
        makespan = plait.simulate(made, COSTS).makespan
        above = makespan / (made.bound or makespan) - 1
        told = f"{made.policy}, {above:.2%} above the bound"
        print(f"| auto, {ranks} × {microbatches} | {told} | {seconds:.1f} |")


def steps() -> None:
    """Seconds of making, simulating and checking one large schedule."""
    made, making = timed(lambda: plait.schedule("interleaved", ranks=64, microbatches=512, chunks=2))
    _, simulating = timed(lambda: plait.simulate(made, COSTS))
    _, checking = timed(lambda: plait.check(made))
    count = sum(map(len, made.actions))
    for what, seconds in (("make", making), ("simulate", simulating), ("check", checking)):
        print(f"| {what} interleaved, 64 × 512 × 2 chunks | {count:,} actions | {seconds:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="search for 32 ranks and 256 micro-batches too")
    options = parser.parse_args()
    lengths()
    print("\n| what | | s |\n|---|---|---|")
    steps()
    searches(SEARCHES, ROUNDS)
    if options.large:
        searches(LARGE, 1)


if __name__ == "__main__":
    main()
