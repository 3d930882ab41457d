"""A run of elastic ranks, of which this process starts those of one host; it writes losses, and what is lost.

    RANK=0 WORLD_SIZE=2 ... elastic_training.py FOLDER --ranks RANKS [--kill RANK STEP] [--seconds SECONDS]
        [--whole-at STEP] [--later] [--hosts HOST ...]

`--kill`: that rank kills itself in that step, once. `--seconds`: a step takes so long. `--whole-at`: before
that step fewer ranks wait until there are all again; with `--later` until there can be, after the step.
`--hosts`: the names of all hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import plait
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.loop import Checkpoints, JsonLines, Log
from plait.ranks import Elastic, all_reduce
from plait.ranks.exchange_with_supervisor import possible_ranks

STEPS, ROWS = 12, 12


class Disturb(Callback):
    """Writes where each generation begins, and how far the run is; kills a rank."""

    def __init__(
        self,
        folder: Path,
        opened: list[str],
        kill: tuple[int, int] | None,
        seconds: float,
        whole_at: tuple[int, int] | None,
    ) -> None:
        self._folder, self._opened, self._kill, self._seconds = folder, opened, kill, seconds
        self._whole_at = whole_at
        self._has_begun = False

    def before_step(self, run: TrainingLoop) -> None:
        rank = run.mesh.rank
        if not self._has_begun:
            self._has_begun = True
            told = {
                "rank": rank,
                "ranks": run.mesh.world,
                "process": os.getpid(),
                "begins_after": run.done,
                "checkpoints_read": len(self._opened),
                "at": time.monotonic(),
            }
            with (self._folder / f"generations-{os.uname().nodename}").open("a") as file:
                file.write(json.dumps(told) + "\n")
        if rank == 0:
            (self._folder / "done").write_text(str(run.done))
            with (self._folder / "steps").open("a") as file:
                file.write(f"{run.done}\n")
        killed = self._folder / "killed"
        if self._kill == (rank, run.done) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._seconds)
        if self._whole_at is not None and self._whole_at[0] == run.done:
            while run.mesh.world < self._whole_at[1]:
                possible = torch.full((1,), float(possible_ranks()))
                if all_reduce(possible, run.mesh.group("world")).wait():  # ends by an error without --later
                    break
                time.sleep(0.05)


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = ROWS

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(64, (self.size, 9), generator=torch.Generator().manual_seed(step))[rows]
        return tokens[:, :-1], tokens[:, 1:]


def train(
    folder: Path,
    kill: tuple[int, int] | None = None,
    seconds: float = 0.0,
    whole_at: tuple[int, int] | None = None,
) -> int:
    """Train with as many data-parallel ranks as there are; return how many."""
    opened: list[str] = []

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "checkpoints/step-" in str(arguments[0]) and not arguments[2] & os.O_CREAT:
            opened.append(str(arguments[0]))

    sys.addaudithook(see)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=64, context=8).double()
    callbacks = [
        Log(JsonLines(folder / "metrics.jsonl"), folder=folder),
        Checkpoints(
            folder / "checkpoints", every=5, resume="no", snapshots=partial(plait.Snapshots, every=1)
        ),
        Disturb(folder, opened, kill, seconds, whole_at),
    ]
    plan = plait.Plan(dp=dist.get_world_size(), strategy="full")
    plait.fit(model, plan, Tokens(), steps=STEPS, callbacks=callbacks)
    return plan.dp


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--kill", type=int, nargs=2)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--whole-at", type=int)
    parser.add_argument("--later", action="store_true")
    parser.add_argument("--hosts", nargs="*", default=())
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    kill = None if options.kill is None else tuple(options.kill)
    whole_at = None if options.whole_at is None else (options.whole_at, options.ranks)
    arguments = (options.folder, kill, options.seconds, whole_at)
    settings = Elastic(
        replace="later" if options.later else True,
        ranks_of=lambda most: max(ranks for ranks in range(1, most + 1) if ROWS % ranks == 0),
        hosts=tuple(options.hosts),
    )
    print(
        plait.launch(
            train, *arguments, ranks=options.ranks, device="cpu", timeout=options.limit, elastic=settings
        )
    )
