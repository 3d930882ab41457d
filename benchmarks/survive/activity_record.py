"""What does it cost a run without failures that its supervisor can see what its ranks wait for?

    .venv/bin/python benchmarks/survive/activity_record.py [--rounds 9] [--steps 5]

Under a supervisor each wait for other ranks writes twice to a file in memory: what the rank waits for, and
that the wait has ended. Counted: the waits of a step. Measured: a pair of writes alone, and steps of the same
ranks with the record and without, in turns, in the processor's seconds, which other programs change less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import plait
from plait.ranks.failure.rank_activity import ActivityFile
from plait.ranks.launch.elastic.options import Elastic

VOCAB, CONTEXT, ROWS = 2048, 128, 8
PLANS = {
    "dp 2, full": plait.Plan(dp=2, strategy="full"),
    "pp 2, 8 micro-batches": plait.Plan(pp=2, microbatches=8),
    "tp 2": plait.Plan(tp=2),
}
WAITS = 20_000
"""Pairs of writes that are measured alone."""


class CountedRecord(ActivityFile):
    """An activity file that counts the waits."""

    waits = 0

    def begin_wait(self, awaited: str) -> None:
        """Count, and write as always."""
        self.waits += 1
        super().begin_wait(awaited)


def bench(plan: plait.Plan, rounds: int, steps: int) -> tuple[int, float, float, float]:
    """Return the waits of a step, and the seconds of a pair of writes and of steps without and with them."""
    mesh = plait.Mesh(plan, device="cpu")
    model = plait.models.gpt2(layers=4, hidden=256, heads=8, vocab=VOCAB, context=CONTEXT)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    log = mesh.group("world").failure_log
    assert log is not None
    record = log.activity
    assert record is not None, "a supervisor started this rank"

    def step() -> None:
        tokens = torch.randint(VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item()
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()

    def seconds() -> float:
        begin = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - begin) / steps

    for _ in range(2):
        step()
    with tempfile.NamedTemporaryFile() as file:
        ActivityFile.begin(Path(file.name))
        log.activity = counted = CountedRecord(Path(file.name))
        step()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for with_record, own in found.items():
            log.activity = record if with_record else None
            own.append(seconds())
    log.activity = record
    begin = time.process_time()
    for _ in range(WAITS):
        record.begin_wait("rank 1 to take part in all-gather #123 over dp (parameters of blocks.3.mlp)")
        record.end_wait()
    pair = (time.process_time() - begin) / WAITS
    without, ratio = (
        statistics.median(found[False]),
        statistics.median(b / a for a, b in zip(*found.values(), strict=True)),
    )
    return counted.waits, pair, without, ratio


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    print("| plan | waits a step | µs a wait | ms of the processor a step | of it, by the count | measured |")
    print("|---|---|---|---|---|---|")
    for name, plan in PLANS.items():
        given = plan, options.rounds, options.steps
        results = plait.launch(bench, *given, ranks=2, threads=1, device="cpu", elastic=Elastic())
        waits, pair, seconds, ratio = results[0]
        share = waits * pair / seconds
        print(f"| {name} | {waits} | {1e6 * pair:.2f} | {1e3 * seconds:.0f} | {share:.3%} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
