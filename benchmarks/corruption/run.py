"""What does it cost a step to look for wrong bits?

    .venv/bin/python benchmarks/corruption/run.py [--rounds 7] [--ranks 2] [--hidden 256] [--strategy none]

Rounds of the same ranks, in turn: steps without checks, with memory checked, with memory checked and one in a
hundred runs of layers computed again. The ratio of a round's times is that of its seconds a step; the median
over rounds counts. Next to it that of the processor's seconds, which other programs change less. Bytes that
sums read in a step are counted, and compared with the formula: 32 a parameter of the rank for fp32 and AdamW
(values, two moments and gradients, twice), and 8 for the numbers of steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args
from unittest.mock import patch

import torch
from torch import Tensor

import plait
from plait.engine.corruption.word_checksums import WordChecksums
from plait.plan.plan import Strategy
from plait.ranks.collectives import all_reduce, barrier

VOCAB, CONTEXT = 2048, 128
CHECKS: dict[str, dict[str, bool | float] | None] = {
    "none": None,
    "memory": {"memory": True},
    "memory, 1 % of layers": {"memory": True, "recheck_rate": 0.01},
}
Rows = dict[str, list[tuple[float, float]]]
"""Of each kind of checks and each round, the seconds of a step and those of the processor."""


@contextmanager
def counted(counts: list[int]) -> Iterator[None]:
    """Append the bytes of all tensors each time their sums are computed, within the context."""
    original = WordChecksums.compute

    def compute(self: WordChecksums) -> Tensor:
        counts.append(self.bytes)
        return original(self)

    with patch.object(WordChecksums, "compute", compute):
        yield


def bench(
    ranks: int, rounds: int, steps: int, layers: int, hidden: int, rows: int, strategy: Strategy
) -> tuple[Rows, int, int, int]:
    """Return seconds a step by round, the bytes that sums read in one and should, and parameters."""
    plan = plait.Plan(dp=ranks, strategy=strategy)
    mesh = plait.Mesh(plan, device="cpu")
    model = plait.models.gpt2(layers=layers, hidden=hidden, heads=8, vocab=VOCAB, context=CONTEXT)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    world = mesh.group("world")

    def step() -> None:
        tokens = torch.randint(VOCAB, (rows, CONTEXT + 1))
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item()
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()

    def seconds(count: int) -> tuple[float, float]:
        """Of the slowest rank, a step; and of its processor."""
        step()
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

    found: Rows = {kind: [] for kind in CHECKS}
    step()
    counts: list[int] = []
    with counted(counts), plait.CorruptionChecks(engine, optimizer):
        step()
        counts.clear()
        step()
        read = sum(counts)
    for _ in range(rounds):
        for kind in CHECKS:
            found[kind].append(checked(kind, steps))
    every = list(engine.parameters())
    parameters = sum(one.numel() for one in every)
    return found, read, 32 * parameters + 8 * len(every), parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 2), ("rounds", 7), ("steps", 10), ("layers", 4), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=16, help="sequences of 128 tokens a rank and step")
    parser.add_argument("--strategy", choices=get_args(Strategy), default="none")
    options = parser.parse_args()
    names = ("ranks", "rounds", "steps", "layers", "hidden", "rows", "strategy")
    given = (getattr(options, name) for name in names)
    found, read, expected, parameters = plait.launch(bench, *given, ranks=options.ranks)[0]
    print(f"{options.ranks} ranks, {parameters:,} parameters, {options.rows * CONTEXT:,} tokens a rank;")
    print(f"sums read {read:,} bytes a step, {expected:,} by the formula:\n")
    print("| checks | ms a step | of a step without | ms of the processor | of those without |")
    print("|---|---|---|---|---|")
    for kind, each in found.items():
        shown = ""
        for clock in (0, 1):
            own, none = ([one[clock] for one in rows] for rows in (each, found["none"]))
            ratio = statistics.median(mine / other for mine, other in zip(own, none, strict=True))
            shown += f" {1e3 * statistics.median(own):.0f} | {ratio:.3f} |"
        print(f"| {kind} |{shown}")


if __name__ == "__main__":
    main()
