"""A slow rank: how soon it is named, what layers that move win back, and what measuring costs.

.venv/bin/python benchmarks/stragglers/run.py [ordinary|slow|counts]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import plait
from plait.engine.action_times import ThreadClock
from plait.loop import Callback, History, Stragglers, TrainingLoop
from plait.plan.plan import Plan

VOCAB, CONTEXT, BATCH, MICROBATCHES = 512, 64, 16, 8
PLANS = {
    "pp 2": Plan(pp=2, microbatches=MICROBATCHES),
    "pp 4": Plan(pp=4, microbatches=MICROBATCHES),
    "dp 2": Plan(dp=2, microbatches=MICROBATCHES // 2),
    "pp 2 × dp 2": Plan(pp=2, dp=2, microbatches=MICROBATCHES // 2),
    "tp 2": Plan(tp=2, microbatches=MICROBATCHES),
}
SLOW_FROM = 31
"""The step from which rank 1 takes twice as long."""


class Tokens:
    """Random tokens, the same in each layout."""

    size = BATCH

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some rows of a step."""
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (self.size, CONTEXT + 1), generator=drawn)[rows]
        return tokens[:, :-1], tokens[:, 1:]


class HalfSpeed(Callback):
    """Lets a rank take twice as long, from a step on: it computes for as long again after each action."""

    def __init__(self, rank: int | None, since: int) -> None:
        self._rank, self._since, self._now = rank, since, 0

    def begin(self, run: TrainingLoop) -> None:
        """Slow the stages of the run's engine."""
        self.replanned(run)

    def replanned(self, run: TrainingLoop) -> None:
        """Slow the stages of the run's new engine."""
        if run.mesh.rank == self._rank:
            for stage in run.engine.runtime.pipeline.stages.values():
                for name in ("forward", "backward_input", "backward_weight"):  # which `backward` calls
                    setattr(stage, name, self._slowed(getattr(stage, name)))

    def before_step(self, run: TrainingLoop) -> None:
        """Note which step begins."""
        self._now = run.done + 1

    def _slowed(self, call: Callable[..., None]) -> Callable[..., None]:
        def slowed(*arguments: int) -> None:
            start = time.thread_time_ns()
            call(*arguments)
            end = 2 * time.thread_time_ns() - start
            while self._now >= self._since and time.thread_time_ns() < end:
                pass

        return slowed


class Run(NamedTuple):
    """A run, as rank 0 saw it."""

    lines: list[tuple[int, str]]
    """Each after so many steps."""
    seconds: list[float]
    """Of each step."""
    stamps: int
    """Of the last step."""


class Told(Callback):
    """Keeps the lines of a run, and counts the readings of clocks in its last step."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.stamps = 0

    def begin(self, run: TrainingLoop) -> None:
        """Keep what the run tells."""
        run.tell = lambda line: self.lines.append((run.done, line))

    def submitted(self, run: TrainingLoop) -> None:
        """Count the stamps of the step that was just submitted."""
        times = run.engine._runner.action_times
        if times is not None:
            self.stamps = sum(2 + 2 * len(note.waits) for note in times._notes)


def train(plan: Plan, steps: int, slow: int | None, *, measures: bool = True, rebalance: bool = False) -> Run:
    """Train a GPT for some steps."""
    model = plait.models.gpt2(layers=12, hidden=96, heads=4, vocab=VOCAB, context=CONTEXT)
    told, history = Told(), History()
    compared = [Stragglers(rebalance=rebalance)] if measures else []
    callbacks = [told, *compared, HalfSpeed(slow, SLOW_FROM), history]
    plait.fit(model, plan, Tokens(), steps=steps, learning_rate=1e-3, callbacks=callbacks)
    return Run(told.lines, [row["step_seconds"] for row in history.rows], told.stamps)


def started(plan: Plan, steps: int, slow: int | None, **options: bool) -> Run:
    """Run `train` on local ranks of one thread each."""
    run: Run = plait.launch(partial(train, plan, steps, slow, **options), ranks=plan.world)[0]
    return run


def ordinary(steps: int) -> None:
    """Print which ranks are named where none is slow."""
    print("| plan | steps | named |\n|---|---|---|")
    for name, plan in PLANS.items():
        named = [line for _, line in started(plan, steps, None).lines if "WARNING" in line]
        print("\n".join([f"| {name} | {steps:,} | {len(named)} |", *named]), flush=True)


def slow(steps: int) -> None:
    """Print when rank 1 is named and what moving layers wins back, beside a run without a slow rank."""
    print(f"Rank 1 takes twice as long from step {SLOW_FROM} on; medians of the last third, ms a step.\n")
    print(
        "| plan | named after | without slow rank | with | rebalanced | won back |\n|---|---|---|---|---|---|"
    )
    for name, plan in PLANS.items():
        runs = [
            started(plan, steps, rank, rebalance=moves)
            for rank, moves in ((None, False), (1, False), (1, True))
        ]
        healthy, before, after = (median(run.seconds[-steps // 3 :]) for run in runs)
        named = [step for step, line in runs[1].lines if line.startswith("WARNING: rank 1 ")]
        after_steps = f"{named[0] - SLOW_FROM + 1} steps" if named else "–"
        won = f"{(before - after) / (before - healthy):.0%}"
        numbers = " | ".join(f"{seconds * 1e3:.0f}" for seconds in (healthy, before, after))
        print(f"| {name} | {after_steps} | {numbers} | {won} |", flush=True)


def counts(steps: int) -> None:
    """Print the readings of clocks of a step, what one takes, and the time of steps with and without."""
    clock, start = ThreadClock(), time.perf_counter()
    for _ in range(100_000):
        clock.stamp()
    print(f"A reading takes {(time.perf_counter() - start) * 1e4:.0f} ns.\n")
    print("| plan | readings a step of rank 0 | ms a step without | with | ratio |\n|---|---|---|---|---|")
    for name, plan in PLANS.items():
        rounds = [[started(plan, steps, None, measures=on) for on in (False, True)] for _ in range(3)]
        without, measured = (
            median(second for pair in rounds for second in pair[on].seconds[5:]) for on in (0, 1)
        )
        stamps = rounds[0][1].stamps
        print(
            f"| {name} | {stamps} | {without * 1e3:.1f} | {measured * 1e3:.1f} | {measured / without:.3f} |",
            flush=True,
        )


KINDS: dict[str, tuple[Callable[[int], None], int]] = {
    "ordinary": (ordinary, 1000),
    "slow": (slow, 90),
    "counts": (counts, 60),
}


def main() -> None:
    """Run what is asked for, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], choices=[*KINDS, []])
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    for kind in given.kinds:
        print(f"\n## {kind}\n")
        run, steps = KINDS[kind]
        run(given.steps or steps)


if __name__ == "__main__":
    main()
