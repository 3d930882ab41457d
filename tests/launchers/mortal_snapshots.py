"""A run with snapshots whose ranks are killed; rank 0 prints its losses, and what it opened of checkpoints.

    torchrun --max-restarts 2 ... mortal_snapshots.py FOLDER KILLED [KIND]

`KILLED`: the steps in which a rank is killed, one an attempt, such as "3,5". `KIND`: "other": each attempt
has another layout of the two ranks; "disk": without snapshots.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import plait
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.loop import Checkpoints, JsonLines, Log

STEPS = 8


class Death(Callback):
    """Kills one rank by SIGKILL in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def submitted(self, run: TrainingLoop) -> None:
        if run.done == self._step and run.mesh.rank == self._step % 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = 4

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(64, (self.size, 9), generator=torch.Generator().manual_seed(step))[rows]
        return tokens[:, :-1], tokens[:, 1:]


LAYOUTS = {
    "other": (plait.Plan(dp=2), plait.Plan(tp=2)),
    "same": (plait.Plan(dp=2, strategy="full"),),
    "disk": (plait.Plan(dp=2, strategy="full"),),
}


class FirstStep(Callback):
    """Takes how many files were opened before the first step."""

    def __init__(self, opened: list[str]) -> None:
        self._opened = opened
        self.count = -1

    def before_step(self, run: TrainingLoop) -> None:
        if self.count < 0:
            self.count = len(self._opened)


def train(folder: Path, killed: list[int], kind: str) -> int:
    """Return how many files of checkpoints this rank has opened to read before its first step."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    opened: list[str] = []

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "checkpoints/step-" in str(arguments[0]) and not arguments[2] & os.O_CREAT:
            opened.append(str(arguments[0]))

    sys.addaudithook(see)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=64, context=8).double()
    snapshots = None if kind == "disk" else partial(plait.Snapshots, every=1)
    checkpoints, first = Checkpoints(folder / "checkpoints", every=2, snapshots=snapshots), FirstStep(opened)
    callbacks = [Log(JsonLines(folder / "metrics.jsonl"), folder=folder), checkpoints, first]
    if attempt < len(killed):
        callbacks.append(Death(killed[attempt]))
    plait.fit(model, LAYOUTS[kind][attempt % len(LAYOUTS[kind])], Tokens(), steps=STEPS, callbacks=callbacks)
    return first.count


if __name__ == "__main__":
    folder, killed = Path(sys.argv[1]), [int(step) for step in sys.argv[2].split(",") if step]
    folder.mkdir(exist_ok=True)
    opened = plait.launch(train, folder, killed, (*sys.argv[3:], "same")[0], device="cpu", timeout=60)
    if os.environ["RANK"] == "0":
        print(json.dumps({"opened": opened, "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}))
