"""How much of its time does a run use for steps that count, where a rank is killed every 30 seconds?

    .venv/bin/python benchmarks/survive/repeated_failures.py [--seconds 600] [--every 30] [--row NAME ...]

Effective time: the steps that are kept, times the time of a step without failures, snapshots and supervisor
(measured before and after the row, since a machine is not always equally fast; the mean of both),
divided by the time from the first step to the end of the run. Steps that are computed twice count once.
"Without new steps": the time around failures in which no step was finished that counts, but for that of one
step, as a share of all time: other work on the machine changes it less. Losses have to be those of the run
without failures, bit by bit. A try: --seconds 90 --every 15.
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
MEASURED = 60.0
"""Seconds of the runs without failures, before and after together, at most."""


@dataclass(frozen=True)
class Run:
    """What is trained, and how its state is kept."""

    strategy: str
    keeps: str = "memory"
    """In memory, on disk, or not at all."""
    seconds: float = 600.0
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
def failures(folder: Path, every: float, seconds: float) -> Iterator[list[float]]:
    """Context in which a rank is killed `every` so many seconds of the run's; yields when one was.

    Which one is drawn from a seed.
    """
    ended, times, dice = threading.Event(), list[float](), random.Random(0)

    def kill() -> None:
        while not (folder / "began").exists() and not ended.wait(0.1):
            pass
        until = time.monotonic() + seconds
        while not ended.wait(every) and time.monotonic() < until:
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


def undisturbed(run: Run, seconds: float) -> tuple[float, dict[int, str]]:
    """Return the median time of a step without failures, and the losses by step."""
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        plain(Path(name), replace(run, keeps="nothing", seconds=seconds))
        ended = sorted((step, at) for step, _, at in steps_of(Path(name)))
        losses = {step: loss for step, loss, _ in steps_of(Path(name))}
    return _median(dict(ended)), losses


def _median(ended: Mapping[int, float]) -> float:
    """The median time of a step, given when each ended."""
    return statistics.median(ended[step + 1] - ended[step] for step in range(len(ended) - 1))


def measure(row: Row, seconds: float, every: float) -> str:
    """Return the cells of a row; asserts that the losses are those of the runs without failures."""
    apart = min(MEASURED, seconds / 3) / 2
    before, expected = undisturbed(row.run, apart)
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        folder = Path(name)
        with failures(folder, every, seconds) as times:
            row.start(folder, replace(row.run, seconds=seconds))
        steps, began = steps_of(folder), float((folder / "began").read_text())
    after, again = undisturbed(row.run, apart)
    losses: dict[int, str] = {}
    for step, loss, _ in steps:
        assert losses.setdefault(step, loss) == loss, f"step {step} was computed again with another loss"
    kept, wall = len(losses), max(seconds, max(at for _, _, at in steps) - began)
    assert sorted(losses) == [*range(kept)]
    assert all(losses[step] == loss for step, loss in (expected | again).items() if step < kept)
    first = {step: at for step, _, at in sorted(steps, key=lambda one: one[2], reverse=True)}
    own, ends = _median(first), sorted([began, *first.values()])
    gaps = {bisect(ends, time) for time in times}
    idle = sum(ends[at] - ends[at - 1] - own for at in gaps if at < len(ends)) / wall
    shown = ", ".join(f"{one * 1e3:.0f}" for one in (before, own, after))
    return f"{len(times)} | {kept} | {shown} | {kept * (before + after) / 2 / wall:.1%} | {idle:.1%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each row")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two failures")
    parser.add_argument("--row", nargs="*", choices=[row.name for row in TABLE], help="only these")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:  # started by torchrun
        run = Run(**json.loads((options.rank / "run.json").read_text()))
        plait.launch(train, options.rank, run, device="cpu", timeout=60.0)
        return
    print(
        "| ranks | failures | steps kept | a step without failures before, between failures, after, ms "
        "| effective time | without new steps |"
    )
    print("|---|---|---|---|---|---|")
    for row in TABLE:
        if not options.row or row.name in options.row:
            print(f"| {row.what} | {measure(row, options.seconds, options.every)} |", flush=True)


if __name__ == "__main__":
    main()
