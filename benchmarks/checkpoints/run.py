"""How long does a checkpoint hold a run up, and how much memory does it take?

    .venv/bin/python benchmarks/checkpoints/run.py [--turns 5] [--ranks 2]

In one run of the same ranks, in turn: a step; a save in the background (how long until the next step may
begin); steps while it is written; a save that is waited for; torch.distributed.checkpoint's save of the same
tensors; a load. Medians over turns, of the slowest rank.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import plait
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.rank_contents import rank_contents, written_by
from plait.engine import Engine
from plait.plan.plan import Plan
from plait.ranks.collectives import all_reduce, barrier

ROWS, CONTEXT, VOCAB = 2, 64, 2048
Times = dict[str, list[float]]


class Bench:
    """One rank's part."""

    def __init__(self, plan: Plan, folder: Path, layers: int) -> None:
        self.mesh = plait.Mesh(plan, device="cpu")
        model = plait.models.gpt2(layers=layers, hidden=512, heads=8, vocab=VOCAB, context=CONTEXT)
        self.engine: Engine = plait.parallelize(model, plan, self.mesh, loss=plait.cross_entropy)
        groups = self.engine.parameter_groups(weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self.folder = folder
        self.series = CheckpointManager(folder / "series", keep_last=1)
        self.steps = 0

    def step(self) -> None:
        tokens = torch.randint(VOCAB, (ROWS * self.engine.plan.microbatches, CONTEXT + 1))
        self.engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item()
        self.engine.step(self.optimizer, 1.0)
        self.optimizer.zero_grad()
        self.steps += 1

    def timed(self, do: Callable[[], object]) -> float:
        """Milliseconds, of the slowest rank."""
        world = self.mesh.group("world")
        barrier(world, checked=False).wait()
        begin = time.perf_counter()
        do()
        taken = torch.tensor((time.perf_counter() - begin) * 1e3)
        return float(all_reduce(taken, world, "max", checked=False).wait())

    def turn(self, times: Times) -> None:
        def note(name: str, do: Callable[[], object]) -> None:
            times.setdefault(name, []).append(self.timed(do))

        note("a step", self.step)
        note(
            "save in the background, until the next step may begin",
            lambda: self.series.save(self.engine, self.optimizer, self.steps, {}),
        )
        note("a step while it is written", self.step)
        self.series.finish()
        note("save, waited for", lambda: plait.save(self.engine, self.optimizer, self.folder / "one"))
        note("the same by torch.distributed.checkpoint", self.by_torch)
        note("load", lambda: plait.load(self.engine, self.optimizer, self.folder / "one"))

    def by_torch(self) -> None:
        """What this rank holds, each tensor under a name of its own."""
        held = written_by(rank_contents(self.engine, self.optimizer), self.mesh.rank)
        tensors = {f"{one.name}@{self.mesh.rank}": one.shard for one in held}
        target = self.folder / "torch"
        if self.mesh.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
        barrier(self.mesh.group("world"), checked=False).wait()
        dcp.save(tensors, checkpoint_id=target)


def measure(plan: Plan, folder: str, turns: int, layers: int) -> tuple[dict[str, float], float, float]:
    bench = Bench(plan, Path(folder), layers)
    bench.step()
    times: Times = {}
    for number in range(turns + 1):
        bench.turn(times if number else {})  # the first warms up
    written = sum(
        one.shard.nbytes for one in written_by(rank_contents(bench.engine, bench.optimizer), bench.mesh.rank)
    )
    copies = bench.series.staging.bytes
    return {name: statistics.median(values) for name, values in times.items()}, written / 1e6, copies / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6, help="blocks: how much there is to be written")
    options = parser.parse_args()
    plans = {"pp 2": Plan(pp=2, microbatches=4), "dp 2, full": Plan(dp=2, strategy="full", microbatches=2)}
    for name, plan in plans.items():
        with tempfile.TemporaryDirectory() as folder:
            told = plait.launch(
                measure, plan, folder, options.turns, options.layers, ranks=2, threads=1, device="cpu"
            )
        times, written, copies = max(told, key=lambda one: one[1])
        print(f"\n{name}: {written:.1f} MB written by the rank with most, {copies:.1f} MB of copies\n")
        print("| | ms | MB/s |\n|---|---|---|")
        for what, taken in times.items():
            speed = "" if what[:6] == "a step" else f"{written / taken * 1e3:,.0f}"
            print(f"| {what} | {taken:.0f} | {speed} |")


if __name__ == "__main__":
    main()
