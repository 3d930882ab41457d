"""How times of ranks scatter on this machine, and what the test of slow ranks makes of it.

    .venv/bin/python benchmarks/stragglers/scatter.py

Records ordinary steps, then replays them: as they were, and with a rank that is slower from a random step on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median, median_low

import torch

import plait
from plait.app.loop.fastest_work_division import layer_costs_of, rank_costs
from plait.app.loop.slow_ranks import NORMAL, SlowRanks
from plait.app.loop.straggler_callback import ELAPSED_WINDOWS, OWN_WINDOWS
from plait.plan.plan import Plan

STEPS, WINDOW, TRIALS, AHEAD = 400, 4, 200, 40
PLANS = {
    "pp 2": Plan(pp=2, microbatches=4),
    "dp 2": Plan(dp=2, microbatches=4),
    "pp 2 × dp 2": Plan(pp=2, dp=2, microbatches=4),
    "tp 2": Plan(tp=2, microbatches=4),
}
Times = Sequence[Sequence[float]]
"""By rank and step."""


def recorded(plan: Plan) -> tuple[list[float], list[float], list[float]]:
    """Return this rank's own times and those that passed, of each step, and all ranks' predicted costs."""
    mesh = plait.Mesh(plan)
    model = plait.models.gpt2(layers=6, hidden=64, heads=4, vocab=256, context=32)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-4)
    times, draw = engine.time_actions(), torch.Generator().manual_seed(mesh.index("dp"))
    own, elapsed = [], []
    for _ in range(STEPS):
        tokens = torch.randint(256, (8, 33), generator=draw)
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        step = times.take()()
        own.append(sum(step.own[:-1]))
        elapsed.append(step.elapsed)
    return own, elapsed, rank_costs(layer_costs_of(engine).total, engine)


def named(times: Times, plan: Plan, costs: Sequence[float], windows: int) -> Iterator[tuple[int, int]]:
    """Yield which rank is named after which step."""
    places = [rank * plan.pp // plan.world for rank in range(plan.world)]
    ranks = SlowRanks(places, costs, windows)
    for first in range(0, len(times[0]) - WINDOW + 1, WINDOW):
        seconds = [median_low(own[first : first + WINDOW]) for own in times]
        found, _ = ranks.add(first + 1, seconds, step=max(seconds))
        yield from ((one.rank, first + WINDOW) for one in found)


def replayed(times: Times, plan: Plan, costs: Sequence[float], windows: int, factor: float) -> str:
    """Return when a rank that is `factor` times as slow from a random step on is named, of many trials."""
    draw, delays, wrong, after = random.Random(1), list[int](), 0, windows * WINDOW * 4
    for _ in range(TRIALS):
        slow, before = draw.randrange(len(times)), AHEAD + draw.randrange(WINDOW * 5)
        start = draw.randrange(before, max(before + 1, len(times[0]) - after))
        part = [
            [
                one * (factor if rank == slow and step >= before else 1.0)
                for step, one in enumerate(own[start - before : start + after])
            ]
            for rank, own in enumerate(times)
        ]
        found = list(named(part, plan, costs, windows))
        wrong += sum(rank != slow or step <= before for rank, step in found)
        delays += [step - before for rank, step in found if rank == slow and step > before][:1]
    late = sorted(delays)
    shown = f"{late[len(late) // 2]} | {late[len(late) * 9 // 10]} | {late[-1]}" if late else "– | – | –"
    return f"{shown} | {TRIALS - len(late)} | {wrong}"


def main() -> None:
    """Print a table."""
    print(f"{STEPS} ordinary steps; {TRIALS} replays with a rank that is slower from a random step on.\n")
    columns = ("plan", "time", "scatter of a step", "named", "slower", "named after: median", "90%", "most")
    print(f"| {' | '.join((*columns, 'never', 'wrong'))} |\n|{'---|' * 10}")
    for name, plan in PLANS.items():
        ranks = plait.launch(partial(recorded, plan), ranks=plan.world)
        for what, kind, windows in (("own", 0, OWN_WINDOWS), ("elapsed", 1, ELAPSED_WINDOWS)):
            times = [rank[kind] for rank in ranks]
            scatter = max(NORMAL * median(abs(one / median(own) - 1) for one in own) for own in times)
            alarms = len(list(named(times, plan, ranks[0][2], windows)))
            for factor in (2.0, 1.4):
                told = replayed(times, plan, ranks[0][2], windows, factor)
                print(f"| {name} | {what} | {scatter:.0%} | {alarms} | {factor} × | {told} |", flush=True)


if __name__ == "__main__":
    main()
