"""What does it cost a step to look for wrong bits?

    .venv/bin/python benchmarks/corruption/run.py [--rounds 7] [--ranks 2] [--hidden 256] [--strategy none]
    .venv/bin/python benchmarks/corruption/run.py --tokens 1024 2048 4096 8192 16384

Rounds of the same ranks, in turn: steps without checks, with memory checked, with memory checked and one in a
hundred runs of layers computed again. The ratio of a round's times is that of its seconds a step; the median
over rounds counts. Next to it that of the processor's seconds, which other programs change less. Bytes that
sums read in a step are counted, and compared with the formula: 32 a parameter of the rank for fp32 and AdamW
(values, two moments and gradients, twice), and 8 for the numbers of steps.

With `--tokens` a table of what checks of memory cost steps of so many tokens a rank, in micro-batches of at
most 2,048. It takes two and a half minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args
from unittest.mock import patch

import torch
from torch import Tensor

import plait
from plait.engine.corruption.word_checksums import WordChecksums
from plait.plan.plan import Strategy
from plait.ranks.collectives import all_reduce, barrier

VOCAB = 2048
MOST_ROWS, MOST_TOKENS = 16, 8192
"""Of a micro-batch, with `--tokens`; and of the steps that are timed together, if a step has not more."""
CHECKS: dict[str, dict[str, bool | float] | None] = {
    "none": None,
    "memory": {"memory": True},
    "memory, 1 % of layers": {"memory": True, "recheck_rate": 0.01},
}
Rows = dict[str, list[tuple[float, float]]]
"""Of each kind of checks and each round, the seconds of a step and those of the processor."""


@contextmanager
def counted(counts: list[tuple[int, int]]) -> Iterator[None]:
    """Append the bytes and the number of calls each time sums are computed, within the context."""
    original = WordChecksums.compute

    def compute(self: WordChecksums) -> Tensor:
        counts.append((self.bytes, len(self._sums)))
        return original(self)

    with patch.object(WordChecksums, "compute", compute):
        yield


@dataclass(frozen=True)
class Case:
    """What is measured: a GPT, its plan, and its batches."""

    ranks: int
    layers: int
    hidden: int
    strategy: Strategy
    context: int
    rows: int
    """Of a rank and micro-batch."""
    microbatches: int

    @property
    def tokens(self) -> int:
        """Of a rank and step."""
        return self.rows * self.microbatches * self.context


class Found(NamedTuple):
    """What was measured."""

    seconds: Rows
    read: int
    """Bytes that sums read in a step of rank 0."""
    expected: int
    parameters: int
    calls: int
    """Of sums in a step of rank 0."""


def bench(case: Case, kinds: Sequence[str], rounds: int, steps: int) -> Found:
    """Return the seconds of a step with each of `kinds` of checks, by round, and what sums read in one."""
    plan = plait.Plan(dp=case.ranks, strategy=case.strategy, microbatches=case.microbatches)
    mesh = plait.Mesh(plan, device="cpu")
    model = plait.models.gpt2(
        layers=case.layers, hidden=case.hidden, heads=8, vocab=VOCAB, context=case.context
    )
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    world = mesh.group("world")

    def step(rows: int = case.rows) -> None:
        tokens = torch.randint(VOCAB, (rows * case.microbatches, case.context + 1))
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item()
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()

    def seconds(count: int) -> tuple[float, float]:
        """Of the slowest rank, a step; and of its processor."""
        step(rows=1)  # the first one with checks prepares them
        barrier(world, checked=False).wait()
        begin = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        end = time.perf_counter(), time.process_time()
        taken = torch.tensor([(after - before) / count for before, after in zip(begin, end, strict=True)])
        wall, processor = all_reduce(taken, world, "max", checked=False).wait().tolist()
        return wall, processor

    def checked(kind: str, count: int) -> tuple[float, float]:
        options = CHECKS[kind]
        if options is None:
            return seconds(count)
        checks = plait.CorruptionChecks(engine, optimizer, **options)  # type: ignore[arg-type]
        taken = seconds(count)
        checks.close()
        return taken

    found: Rows = {kind: [] for kind in kinds}
    step()
    counts: list[tuple[int, int]] = []
    with counted(counts), plait.CorruptionChecks(engine, optimizer):
        step()
        counts.clear()
        step()
        read, calls = map(sum, zip(*counts, strict=True))
    for _ in range(rounds):
        for kind in kinds:
            found[kind].append(checked(kind, steps))
    every = list(engine.parameters())
    parameters = sum(one.numel() for one in every)
    return Found(found, read, 32 * parameters + 8 * len(every), parameters, calls)


def ratios(found: Rows, kind: str, clock: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and of its ratios to one without checks in the same round."""
    own, none = ([one[clock] for one in rows] for rows in (found[kind], found["none"]))
    ratio = statistics.median(mine / other for mine, other in zip(own, none, strict=True))
    return 1e3 * statistics.median(own), ratio


def table(case: Case, tokens: Sequence[int], rounds: int) -> None:
    """Print what checks of memory cost steps of so many tokens a rank."""
    columns = ("ms a step without", "with", "ratio", "ms of the processor without", "with", "ratio")
    print(f"| tokens a rank and step | {' | '.join(columns)} |\n|{'---|' * 7}", flush=True)
    for count in tokens:
        every = max(1, count // case.context)
        microbatches = -(-every // MOST_ROWS)
        own = replace(case, rows=every // microbatches, microbatches=microbatches)
        steps = max(1, MOST_TOKENS // own.tokens)
        kinds = ("none", "memory")
        found = plait.launch(bench, own, kinds, rounds, steps, ranks=case.ranks)[0].seconds
        shown = [f"{own.tokens:,}"]
        for clock in (0, 1):
            without, (with_it, ratio) = ratios(found, "none", clock)[0], ratios(found, "memory", clock)
            shown += [f"{without:.0f}", f"{with_it:.0f}", f"{ratio:.3f}"]
        print(f"| {' | '.join(shown)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 2), ("rounds", 7), ("steps", 10), ("layers", 4), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a rank and micro-batch")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=1, help="of a rank and step")
    parser.add_argument("--strategy", choices=get_args(Strategy), default="none")
    parser.add_argument("--tokens", type=int, nargs="+", help="a table of steps of so many tokens a rank")
    given = parser.parse_args()
    names = ("ranks", "layers", "hidden", "strategy", "context", "rows", "microbatches")
    case = Case(**{name: getattr(given, name) for name in names})
    if given.tokens:
        table(case, given.tokens, given.rounds)
        return
    found = plait.launch(bench, case, tuple(CHECKS), given.rounds, given.steps, ranks=given.ranks)[0]
    print(f"{given.ranks} ranks, {found.parameters:,} parameters, {case.tokens:,} tokens a rank;")
    print(
        f"sums read {found.read:,} bytes a step, {found.expected:,} by the formula, in {found.calls} calls:\n"
    )
    print("| checks | ms a step | of a step without | ms of the processor | of those without |")
    print("|---|---|---|---|---|")
    for kind in CHECKS:
        each = (ratios(found.seconds, kind, clock) for clock in (0, 1))
        cells = (f"{taken:.0f} | {ratio:.3f}" for taken, ratio in each)
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
