"""How much of what a rank at half speed costs is won back by other cuts and orders, by simulation?

    .venv/bin/python benchmarks/stragglers/best_cuts.py

A GPT with 24 blocks, of which attention and MLP are layers, and a head that costs as much as 2.7 blocks. For
each plan and slow rank: the cut that `Stragglers` finds, the best of all cuts, and cut and order together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb

from plait.app.loop.fastest_work_division import StepSimulation
from plait.app.loop.work_division import WorkDivision
from plait.schedules.costs import peak_memory
from plait.schedules.search.schedule_by_policy import schedule
from plait.schedules.search.stage_cuts import CutSimulation, LayerCosts, StageCut, fastest_cut

BLOCKS, HEAD = 24, 2.7
LAYERS = (0.01, *(1 / 3, 2 / 3) * BLOCKS, HEAD)
"""Costs of layers, in those of a block."""
PLANS = [(2, 8, "1f1b"), (2, 8, "zb-h1"), (2, 32, "1f1b"), (4, 8, "1f1b"), (4, 8, "zb-h1"), (4, 32, "1f1b")]
MOST_CUTS = 20_000


def best_of_all(simulation: CutSimulation, layers: int, stages: int) -> StageCut:
    """Return the cut with the shortest simulated step, of all cuts."""
    best: StageCut = ()
    least = -1
    for bounds in combinations(range(1, layers), stages - 1):
        cut = tuple(stop - start for start, stop in pairwise((0, *bounds, layers)))
        if least < 0 or simulation.least(cut) < least:
            makespan = simulation.makespan(cut)
            if least < 0 or makespan < least:
                best, least = cut, makespan
    return best


def row(ranks: int, microbatches: int, policy: str, slow: int) -> Sequence[str]:
    """Return the cells of the table for a plan and a slow rank."""
    costs = LayerCosts.evenly(LAYERS).with_messages(ranks)
    order = schedule(policy, ranks=ranks, microbatches=microbatches)
    now = WorkDivision(fastest_cut(costs, order), order, (1,))
    factors = tuple(2.0 if rank == slow else 1.0 for rank in range(ranks))
    step = StepSimulation(costs, (factors,))
    before, healthy = step.seconds(now), step.seconds_without_slow_ranks(now)

    def won(work: WorkDivision) -> str:
        return f"{(before - step.seconds(work)) / (before - healthy):.0%}"

    cut = step.with_fastest_cut(now)
    best = "–"
    if comb(len(LAYERS) - 1, ranks - 1) <= MOST_CUTS:
        exact = CutSimulation(costs, order.split_backward, factors)
        best = won(WorkDivision(best_of_all(exact, len(LAYERS), ranks), order, (1,)))
    start = time.process_time()
    both = step.fastest(now, moves_rows=False, memory_limit=float(max(peak_memory(order))))
    seconds = time.process_time() - start
    most = f"{2 - ranks / (ranks - 0.5):.0%}"
    cuts = ", ".join(map(str, both.cut))
    return (
        policy,
        *map(str, (ranks, microbatches, slow)),
        won(cut),
        best,
        won(both),
        most,
        cuts,
        f"{seconds:.1f}",
    )


def main() -> None:
    """Print a table."""
    columns = ("order", "pp", "micro-batches", "slow rank", "cut", "best of all cuts", "cut and order")
    columns += ("at most, without bubbles", "layers then", "search, s")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for ranks, microbatches, policy in PLANS:
        for slow in range(ranks):
            print(f"| {' | '.join(row(ranks, microbatches, policy, slow))} |", flush=True)


if __name__ == "__main__":
    main()
