"""How much of its time does a run use for steps that count, where a rank is killed every 30 seconds?

    .venv/bin/python benchmarks/survive/repeated_failures.py [--row NAME ...] [--runs 10] [--seconds 60]
                                                             [--every 30] [--keep-every 10]

A row is ten runs of a minute, and between them short runs without failures, snapshots and supervisor: a
machine is not always equally fast. Effective time: the steps that a run keeps, times the time of a step in
the runs before and after it (their mean), divided by its time from the first step to its end. Steps that are
computed twice count once. "Without new steps": the time around failures in which no step was
finished that counts, but for that of one step, as a share of all time. Losses have to be those of the runs
without failures, bit by bit. A try: --runs 2 --seconds 40 --every 15.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from injected_run import Checkpoints
from torch import Tensor

import plait
from plait.engine.resharding.reshard_kept import reshard_kept
from plait.ranks.collectives import all_reduce

ROWS, CONTEXT, VOCAB = 8, 128, 512
UNDISTURBED = 10.0
"""Seconds of each run without failures."""


@dataclass(frozen=True)
class Run:
    """What is trained, and how its state is kept."""

    strategy: str
    keeps: str = "memory"
    """In memory, on disk, or not at all."""
    seconds: float = 60.0
    every: int = 10
    """Steps between snapshots, or checkpoints."""


def model() -> torch.nn.Sequential:
    """A GPT of 3.4 million parameters."""
    return plait.models.gpt2(layers=4, hidden=256, heads=4, vocab=VOCAB, context=CONTEXT)


def make_optimizer(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The run's optimizer."""
    return torch.optim.AdamW(groups, lr=1e-3)


def train(folder: Path, run: Run) -> int:
    """Train on one rank until the time is over; return the number of finished steps."""
    plan = plait.Plan(pp=2, dp=2, microbatches=2, strategy=run.strategy)
    mesh = plait.Mesh(plan, device="cpu", timeout=60.0)
    (folder / f"process-{mesh.rank}").write_text(str(os.getpid()))
    moved = reshard_kept(model, make_optimizer, plan, mesh, loss=plait.cross_entropy)
    if moved is None:
        engine = plait.parallelize(model(), plan, mesh, loss=plait.cross_entropy)
        moved = engine, make_optimizer(engine.parameter_groups())
    engine, optimizer = moved
    with _kept(folder, run, engine, optimizer) as kept:
        found = None if kept is None else kept.restore()
        step = 0 if found is None else found.step
        while not _is_over(folder, run, mesh):
            loss = train_step(engine, optimizer, step)
            with (folder / f"steps-{mesh.rank}.jsonl").open("a") as file:
                file.write(f"{json.dumps([step, loss.hex(), time.monotonic()])}\n")
            step += 1
            if kept is not None:
                kept.step(step)
    return step


def train_step(engine: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train on the batch of a step; return its loss."""
    share = tokens_of(step).chunk(2)[engine.mesh.index("dp")]
    loss = engine.forward_backward(share[:, :-1], share[:, 1:]).item()
    engine.step(optimizer, 1.0)
    optimizer.zero_grad()
    return float(loss)


def tokens_of(step: int) -> Tensor:
    """The batch of a step, `[ROWS, CONTEXT + 1]`."""
    return torch.randint(VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def _kept(folder: Path, run: Run, engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """What keeps the run's state, in a context."""
    if run.keeps == "nothing":
        return nullcontext()
    if run.keeps == "disk":
        return Checkpoints(folder / "checkpoints", engine, optimizer, run.every)
    return plait.Snapshots(engine, optimizer, every=run.every, name=str(folder))


def _is_over(folder: Path, run: Run, mesh: plait.Mesh) -> bool:
    """Whether the time of the run is over, by the clock of rank 0."""
    began = folder / "began"
    if mesh.rank == 0 and not began.exists():
        began.write_text(str(time.monotonic()))
    is_over = mesh.rank == 0 and time.monotonic() > float(began.read_text()) + run.seconds
    return bool(all_reduce(torch.tensor(float(is_over)), mesh.group("world"), "max").wait())


@contextmanager
def failures(folder: Path, every: float, seconds: float, seed: int) -> Iterator[list[float]]:
    """Context in which a rank is killed `every` so many seconds, first after half of them.

    Yields the times. Which one is killed is drawn from a seed.
    """
    ended, times, dice = threading.Event(), list[float](), random.Random(seed)

    def kill() -> None:
        while not (folder / "began").exists() and not ended.wait(0.1):
            pass
        until, pause = time.monotonic() + seconds, every / 2
        while not ended.wait(pause) and time.monotonic() < until:
            pause = every
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"process-{dice.randrange(4)}").read_text()), signal.SIGKILL)
                times.append(time.monotonic())

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join()


def plain(folder: Path, run: Run) -> None:
    """Ranks without a supervisor."""
    plait.launch(train, folder, run, ranks=4, threads=1, device="cpu", timeout=60.0)


def elastic(folder: Path, run: Run) -> None:
    """Ranks under plait's supervisor, with a spare."""
    own = plait.ranks.Elastic(spares=1)
    plait.launch(train, folder, run, ranks=4, threads=1, device="cpu", timeout=60.0, elastic=own)


def torchrun(folder: Path, run: Run) -> None:
    """Ranks under torchrun, which starts all of them again."""
    (folder / "run.json").write_text(json.dumps(asdict(run)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--max-restarts",
        "999",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, __file__, "--rank", str(folder)], check=True, env=environment, capture_output=True
    )


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    what: str
    run: Run
    start: Callable[[Path, Run], None]


TABLE = (
    Row("sharded", "plait, a spare; optimizer state and gradients sharded", Run("gradients"), elastic),
    Row("replicas", "plait, a spare; replicas", Run("none"), elastic),
    Row("torchrun", "torchrun, checkpoints on disk", Run("gradients", "disk"), torchrun),
)


def steps_of(folder: Path) -> list[tuple[int, str, float]]:
    """What the ranks wrote of each step: its number, its loss, and when it ended."""
    files = folder.glob("steps-*.jsonl")
    return [tuple(json.loads(line)) for file in files for line in file.read_text().splitlines()]


def undisturbed(run: Run) -> tuple[float, dict[int, str]]:
    """Return the mean time of a step without failures, and the losses by step."""
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        plain(Path(name), replace(run, keeps="nothing", seconds=UNDISTURBED))
        ended = sorted((step, at) for step, _, at in steps_of(Path(name)))
        losses = {step: loss for step, loss, _ in steps_of(Path(name))}
    last = dict(ended)
    return (last[len(last) - 1] - last[0]) / (len(last) - 1), losses


def _median(ended: Mapping[int, float]) -> float:
    """The median time of a step, given when each ended."""
    return statistics.median(ended[step + 1] - ended[step] for step in range(len(ended) - 1))


@dataclass(frozen=True)
class Measured:
    """What one run with failures has shown; times in seconds."""

    failures: int
    losses: dict[int, str]
    wall: float
    step: float
    """The median time of a step between failures."""
    idle: float
    """Without new steps."""


def measure(row: Row, every: float, seed: int) -> Measured:
    """Run once with failures. Asserts that a step that was computed twice has the same loss."""
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        folder = Path(name)
        with failures(folder, every, row.run.seconds, seed) as times:
            row.start(folder, row.run)
        steps, began = steps_of(folder), float((folder / "began").read_text())
    losses: dict[int, str] = {}
    for step, loss, _ in steps:
        assert losses.setdefault(step, loss) == loss, f"step {step} was computed again with another loss"
    assert sorted(losses) == [*range(len(losses))]
    wall = max(row.run.seconds, max(at for _, _, at in steps) - began)
    first = {step: at for step, _, at in sorted(steps, key=lambda one: one[2], reverse=True)}
    own, ends = _median(first), sorted([began, *first.values()])
    gaps = {bisect(ends, time) for time in times}
    idle = sum(ends[at] - ends[at - 1] - own for at in gaps if at < len(ends))
    return Measured(len(times), losses, wall, own, idle)


def cells(row: Row, runs: int, every: float) -> str:
    """Return the cells of a row. Asserts that losses are those of the runs without failures."""
    apart, found = [undisturbed(row.run)], list[Measured]()
    for seed in range(runs):
        found.append(measure(row, every, seed))
        apart.append(undisturbed(row.run))
    for _, expected in apart:
        for one in found:
            assert all(one.losses[step] == loss for step, loss in expected.items() if step in one.losses)
    wall = sum(one.wall for one in found)
    shares = [
        len(one.losses) * (before + after) / 2 / one.wall
        for one, (before, _), (after, _) in zip(found, apart, apart[1:], strict=False)
    ]
    step = statistics.median(one.step for one in found)
    without = statistics.mean(seconds for seconds, _ in apart)
    kept = sum(len(one.losses) for one in found)
    idle = sum(one.idle for one in found) / wall
    return (
        f"{sum(one.failures for one in found)} | {kept} | {without * 1e3:.0f}, {step * 1e3:.0f} "
        f"| {statistics.mean(shares):.1%} ({min(shares):.0%} to {max(shares):.0%}) | {idle:.1%}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="of each row")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two failures")
    parser.add_argument("--keep-every", type=int, default=10, help="steps between snapshots or checkpoints")
    parser.add_argument("--row", nargs="*", choices=[row.name for row in TABLE], help="only these")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:  # started by torchrun
        run = Run(**json.loads((options.rank / "run.json").read_text()))
        plait.launch(train, options.rank, run, device="cpu", timeout=60.0)
        return
    print(
        "| ranks | failures | steps kept | ms a step without failures, mean; between them, median "
        "| effective time | without new steps |"
    )
    print("|---|---|---|---|---|---|")
    for row in TABLE:
        if not options.row or row.name in options.row:
            own = replace(row, run=replace(row.run, seconds=options.seconds, every=options.keep_every))
            print(f"| {row.what} | {cells(own, options.runs, options.every)} |", flush=True)


if __name__ == "__main__":
    main()
