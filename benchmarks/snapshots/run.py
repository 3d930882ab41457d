"""What do snapshots in memory cost a step?

    .venv/bin/python benchmarks/snapshots/run.py [--rounds 5] [--ranks 2] [--hidden 256]

Rounds of the same ranks, in turn: steps without snapshots, with one every 10 steps, with one after each step.
The ratio of a round's times is that of its seconds a step; the median over rounds counts. Bytes are counted,
and compared with the formula.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from math import prod

import torch

import plait
from plait.ranks.collectives import all_reduce, barrier

VOCAB, CONTEXT = 2048, 128
EVERY = {"none": 0, "every 10": 10, "every step": 1}
Rows = dict[str, list[float]]


def bench(
    ranks: int, rounds: int, steps: int, layers: int, hidden: int, rows: int
) -> tuple[Rows, int, int, float]:
    """Return seconds a step by round, bytes of a snapshot, counted and expected, and seconds of a restore."""
    plan = plait.Plan(dp=ranks, strategy="optimizer")
    mesh = plait.Mesh(plan, device="cpu")
    model = plait.models.gpt2(layers=layers, hidden=hidden, heads=8, vocab=VOCAB, context=CONTEXT)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    snapshots = plait.Snapshots(engine, optimizer, every=1, name="benchmark")
    world, done = mesh.group("world"), 0

    def step(every: int) -> None:
        nonlocal done
        tokens = torch.randint(VOCAB, (rows, CONTEXT + 1))
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item()
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        done += 1
        if every and done % every == 0:
            snapshots.step(done)

    def seconds(do: Callable[[], object]) -> float:
        """Of the slowest rank."""
        barrier(world, checked=False).wait()
        begin = time.perf_counter()
        do()
        taken = torch.tensor(time.perf_counter() - begin)
        return float(all_reduce(taken, world, "max", checked=False).wait())

    found: Rows = {kind: [] for kind in EVERY}
    for _ in range(2):
        step(1)  # reserves both halves
    for _ in range(rounds):
        for kind, every in EVERY.items():
            found[kind].append(seconds(lambda every=every: [step(every) for _ in range(steps)]) / steps)  # type: ignore[misc]
    before = snapshots.bytes_copied
    snapshots.step(done)
    copied = all_reduce(torch.tensor(snapshots.bytes_copied - before), world, checked=False).wait()
    sizes = [prod(layout.shape) for layout in engine.shard_plan.layouts.values()]
    expected = 3 * 4 * sum(sizes) + 4 * len(sizes)  # fp32 values, two moments and a number of steps each
    restored = seconds(snapshots.restore)
    snapshots.close()
    return found, int(copied), expected, restored


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "ranks": 2,
        "rounds": 5,
        "steps": 10,
        "layers": 4,
        "hidden": 256,
        "rows": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    results = plait.launch(
        bench,
        given.ranks,
        given.rounds,
        given.steps,
        given.layers,
        given.hidden,
        given.rows,
        ranks=given.ranks,
        device="cpu",
    )
    rows, copied, expected, restored = results[0]
    print(
        f"{given.ranks} ranks; {copied:,} bytes a snapshot, {expected:,} by the formula; "
        f"restored in {restored:.2f} s"
    )
    print("\n| snapshots | ms a step | of a step without |\n|---|---|---|")
    for kind, taken in rows.items():
        ratios = [one / none for one, none in zip(taken, rows["none"], strict=True)]
        print(f"| {kind} | {statistics.median(taken) * 1e3:.0f} | {statistics.median(ratios):.3f} |")


if __name__ == "__main__":
    main()
