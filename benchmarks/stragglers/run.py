"""A slow rank: how soon it is named, what layers that move win back, and what measuring costs.

.venv/bin/python benchmarks/stragglers/run.py [ordinary|slow|sleeping|counts]
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import plait
from plait.engine.action_times import ThreadClock
from plait.engine.blueprint import assumed_costs
from plait.engine.pipeline.stage import Stage
from plait.loop import Callback, History, Stragglers, TrainingLoop
from plait.plan.plan import Plan
from plait.tensor.nested_values import tensors_of

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
METHODS = ("forward", "backward_input", "backward_weight")
"""Of a stage: what `backward` calls, too."""
DEEP_PLANS = {
    "pp 2": Plan(pp=2, microbatches=MICROBATCHES),
    "pp 4": Plan(pp=4, microbatches=MICROBATCHES),
    "pp 4, 32 micro-batches": Plan(pp=4, microbatches=32),
    "pp 4, zb-h1": Plan(pp=4, microbatches=MICROBATCHES, schedule="zb-h1"),
    "pp 2 × dp 2": Plan(pp=2, dp=2, microbatches=MICROBATCHES),
    "dp 2": Plan(dp=2, microbatches=MICROBATCHES),
    "dp 4": Plan(dp=4, microbatches=MICROBATCHES),
}
ASLEEP_FROM = 16
ROWS = 4
"""Of a micro-batch, where layers sleep."""


class Tokens:
    """Random tokens, the same in each layout."""

    def __init__(self, size: int, context: int) -> None:
        self.size, self.context = size, context

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some rows of a step."""
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (self.size, self.context + 1), generator=drawn)[rows]
        return tokens[:, :-1], tokens[:, 1:]


class HalfSpeed(Callback):
    """Lets a rank take twice as long, from a step on: it computes for as long again after each action."""

    def __init__(self, rank: int | None, since: int) -> None:
        self._rank, self._since, self._now = rank, since, 0
        self._stages: list[Stage] = []
        """Those that are slowed already."""

    def begin(self, run: TrainingLoop) -> None:
        """Slow the stages of the run's engine."""
        self.replanned(run)

    def replanned(self, run: TrainingLoop) -> None:
        """Slow the stages of the run's engine, if they are new."""
        for stage in run.engine.runtime.pipeline.stages.values():
            if not any(stage is one for one in self._stages):
                self._stages.append(stage)
                self.slow_stage(run, stage)

    def before_step(self, run: TrainingLoop) -> None:
        """Note which step begins."""
        self._now = run.done + 1

    def is_slow(self, run: TrainingLoop) -> bool:
        """Return whether this rank is slow in this step."""
        return run.mesh.rank == self._rank and self._now >= self._since

    def slow_stage(self, run: TrainingLoop, stage: Stage) -> None:
        """Let a stage compute for as long again in the steps in which this rank is slow."""
        for name in METHODS:
            setattr(stage, name, self._slowed(run, getattr(stage, name)))

    def _slowed(self, run: TrainingLoop, call: Callable[..., None]) -> Callable[..., None]:
        def slowed(*arguments: int) -> None:
            start = time.thread_time_ns()
            call(*arguments)
            end = 2 * time.thread_time_ns() - start
            while self.is_slow(run) and time.thread_time_ns() < end:
                pass

        return slowed


class ElapsedClock(ThreadClock):
    """Clock of the time that passes: what sleeps stands for a device, which waits for no core of the host."""

    def stamp(self) -> tuple[int, int]:
        """Return the nanoseconds that passed, and no waits."""
        return time.perf_counter_ns(), 0


class Asleep(HalfSpeed):
    """Lets layers take their time without a core, as on an accelerator: they sleep, on a slow rank longer.

    Forwards, input and weight gradients take what the costs of their layers say, in proportion to rows; on
    the slow rank twice as long.
    """

    def __init__(self, rank: int | None, since: int, rank_seconds: float) -> None:
        """`rank_seconds`: what the layers of a rank take in a step if none is slow and all do as much."""
        super().__init__(rank, since)
        self._rank_seconds = rank_seconds

    def replanned(self, run: TrainingLoop) -> None:
        """Slow the stages of the run's engine, if they are new, and measure it by a clock of what passes."""
        super().replanned(run)
        times = run.engine._runner.action_times
        if times is not None:
            times._clock = ElapsedClock()

    def slow_stage(self, run: TrainingLoop, stage: Stage) -> None:
        """Let each call of a stage last as long as its layers cost."""
        blueprint, plan = run.engine.blueprint, run.engine.plan
        costs = assumed_costs(blueprint.sequence, blueprint.output_linear)
        unit = self._rank_seconds * plan.pp / plan.microbatches / sum(costs.total)
        rows = run.batches.size / plan.dp / plan.microbatches
        calls: dict[tuple[int, int], tuple[int, float]] = {}
        """By micro-batch and first layer: the last layer that ran with it, and the part of usual rows."""
        layers = blueprint.stage_layers[stage.number]
        for name, kind in zip(METHODS, (costs.F, costs.I, costs.W), strict=True):
            seconds = [unit * kind[layer] for layer in layers]
            setattr(stage, name, self._asleep(run, stage, name, seconds, rows, calls))

    def _asleep(
        self,
        run: TrainingLoop,
        stage: Stage,
        name: str,
        seconds: list[float],
        rows: float,
        calls: dict[tuple[int, int], tuple[int, float]],
    ) -> Callable[..., None]:
        original = getattr(stage, name)

        def asleep(microbatch: int, layer: int, *others: int) -> None:
            end = time.perf_counter()
            if name == METHODS[0]:
                given = next(tensors_of(stage.values[microbatch]))
                calls[microbatch, layer] = max([layer, *others]), len(given) / rows
            last, part = calls[microbatch, layer]
            end += sum(seconds[layer : last + 1]) * part * (2 if self.is_slow(run) else 1)
            original(microbatch, layer, *others)
            time.sleep(max(0.0, end - time.perf_counter()))

        return asleep


class Options(NamedTuple):
    """What is run."""

    steps: int
    plans: Sequence[str]
    """By name; empty: all of the kind."""
    seconds: float
    """That layers sleep a rank and step."""


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


def train(
    plan: Plan,
    steps: int,
    slow: int | None,
    *,
    measures: bool = True,
    rebalance: bool = False,
    asleep: float = 0.0,
) -> Run:
    """Train a GPT for some steps; `asleep`: its layers sleep, so many seconds a rank and step."""
    layers, hidden, context = (24, 16, 8) if asleep else (12, 96, CONTEXT)
    model = plait.models.gpt2(layers=layers, hidden=hidden, heads=4, vocab=VOCAB, context=context)
    told, history = Told(), History()
    compared = [Stragglers(rebalance=rebalance)] if measures else []
    slowed = Asleep(slow, ASLEEP_FROM, asleep) if asleep else HalfSpeed(slow, SLOW_FROM)
    batches = Tokens(ROWS * plan.microbatches * plan.dp, context) if asleep else Tokens(BATCH, context)
    callbacks = [told, *compared, slowed, history]
    plait.fit(model, plan, batches, steps=steps, learning_rate=1e-3, callbacks=callbacks)
    return Run(told.lines, [row["step_seconds"] for row in history.rows], told.stamps)


def started(plan: Plan, steps: int, slow: int | None, **options: Any) -> Run:
    """Run `train` on local ranks of one thread each."""
    run: Run = plait.launch(partial(train, plan, steps, slow, **options), ranks=plan.world)[0]
    return run


def ordinary(options: Options) -> None:
    """Print which ranks are named where none is slow."""
    print("| plan | steps | named |\n|---|---|---|")
    for name in options.plans or PLANS:
        plan = PLANS[name]
        named = [line for _, line in started(plan, options.steps, None).lines if "WARNING" in line]
        print("\n".join([f"| {name} | {options.steps:,} | {len(named)} |", *named]), flush=True)


def slow(options: Options) -> None:
    """Print when rank 1 is named and what moving layers wins back, beside a run without a slow rank."""
    print(f"Rank 1 takes twice as long from step {SLOW_FROM} on; medians of the last third, ms a step.\n")
    print(
        "| plan | named after | without slow rank | with | rebalanced | won back |\n|---|---|---|---|---|---|"
    )
    for name in options.plans or PLANS:
        plan = PLANS[name]
        runs = [
            started(plan, options.steps, rank, rebalance=moves)
            for rank, moves in ((None, False), (1, False), (1, True))
        ]
        healthy, before, after = (median(run.seconds[-options.steps // 3 :]) for run in runs)
        named = [step for step, line in runs[1].lines if line.startswith("WARNING: rank 1 ")]
        after_steps = f"{named[0] - SLOW_FROM + 1} steps" if named else "–"
        won = f"{(before - after) / (before - healthy):.0%}"
        numbers = " | ".join(f"{seconds * 1e3:.0f}" for seconds in (healthy, before, after))
        print(f"| {name} | {after_steps} | {numbers} | {won} |", flush=True)


def sleeping(options: Options) -> None:
    """Print what is won back where layers sleep, so that ranks do not compete for cores, and how."""
    print(
        f"Layers sleep, {options.seconds * 1e3:.0f} ms a rank and step; rank 1 twice as long from step "
        f"{ASLEEP_FROM} on; the shortest of the steps before, until work is moved, and after, ms.\n"
    )
    columns = ("plan", "named after", "without slow rank", "with", "rebalanced", "won back")
    columns += ("simulation says", "at most, without bubbles")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    changes = []
    for name in options.plans or DEEP_PLANS:
        plan = DEEP_PLANS[name]
        run = started(plan, options.steps, 1, rebalance=True, asleep=options.seconds)
        changes += [f"{name}, after step {step}: {line}" for step, line in run.lines]
        named = [step for step, line in run.lines if line.startswith("WARNING: rank 1 ")]
        moved = [(step, line) for step, line in run.lines if line.startswith("Rebalanced")]
        if not named or not moved:
            print(f"| {name} | nothing was moved |", flush=True)
            continue
        last = moved[0][0]
        healthy = min(run.seconds[3 : ASLEEP_FROM - 1])
        before, after = min(run.seconds[ASLEEP_FROM - 1 : last]), min(run.seconds[last + 1 :])
        numbers = " | ".join(f"{seconds * 1e3:.0f}" for seconds in (healthy, before, after))
        won = f"{(before - after) / (before - healthy):.0%}"
        (says,) = re.findall(r"(\d+%) of what", moved[0][1])
        most = f"{2 - plan.world / (plan.world - 0.5):.0%}"
        print(
            f"| {name} | {named[0] - ASLEEP_FROM + 1} steps | {numbers} | {won} | {says} | {most} |",
            flush=True,
        )
    print("\n" + "\n".join(changes))


def counts(options: Options) -> None:
    """Print the readings of clocks of a step, what one takes, and the time of steps with and without."""
    clock, start = ThreadClock(), time.perf_counter()
    for _ in range(100_000):
        clock.stamp()
    print(f"A reading takes {(time.perf_counter() - start) * 1e4:.0f} ns.\n")
    print("| plan | readings a step of rank 0 | ms a step without | with | ratio |\n|---|---|---|---|---|")
    for name in options.plans or PLANS:
        plan = PLANS[name]
        rounds = [[started(plan, options.steps, None, measures=on) for on in (False, True)] for _ in range(3)]
        without, measured = (
            median(second for pair in rounds for second in pair[on].seconds[5:]) for on in (0, 1)
        )
        stamps = rounds[0][1].stamps
        print(
            f"| {name} | {stamps} | {without * 1e3:.1f} | {measured * 1e3:.1f} | {measured / without:.3f} |",
            flush=True,
        )


def main() -> None:
    """Run what is asked for, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], choices=[*KINDS, []])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument(
        "--plans", nargs="+", default=(), help="the plans of the tables, by name; default: all"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of sleep a rank and step")
    given = parser.parse_args()
    for kind in given.kinds:
        print(f"\n## {kind}\n")
        run, steps = KINDS[kind]
        run(Options(given.steps or steps, given.plans, given.seconds))


KINDS: dict[str, tuple[Callable[[Options], None], int]] = {
    "ordinary": (ordinary, 1000),
    "slow": (slow, 90),
    "sleeping": (sleeping, 40),
    "counts": (counts, 60),
}


if __name__ == "__main__":
    main()
