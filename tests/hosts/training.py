"""A run of two ranks with a snapshot after every step, which writes its losses and where each rank began.

    torchrun ... training.py FOLDER NAME [--stop-at STEP]

`--stop-at`: after this step the ranks wait, until they are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import plait
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.loop import Checkpoints, JsonLines, Log

STEPS = 8


class Begin(Callback):
    """Writes after how many steps this rank begins, and how many files of checkpoints it has read."""

    def __init__(self, folder: Path, opened: list[str], stop_at: int | None) -> None:
        self._folder, self._opened, self._stop_at = folder, opened, stop_at
        self._is_written = False

    def before_step(self, run: TrainingLoop) -> None:
        if not self._is_written:
            told = {"begins_after": run.done, "checkpoints_read": len(self._opened)}
            (self._folder / f"rank-{run.mesh.rank}.json").write_text(json.dumps(told))
            self._is_written = True
        if run.done == self._stop_at:
            (self._folder / "stopped").touch()
            time.sleep(600)


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = 4

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(64, (self.size, 9), generator=torch.Generator().manual_seed(step))[rows]
        return tokens[:, :-1], tokens[:, 1:]


def train(folder: Path, name: str, stop_at: int | None) -> None:
    opened: list[str] = []

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "checkpoints/step-" in str(arguments[0]) and not arguments[2] & os.O_CREAT:
            opened.append(str(arguments[0]))

    sys.addaudithook(see)
    model = plait.models.gpt2(layers=2, hidden=16, heads=2, vocab=64, context=8).double()
    snapshots = partial(plait.Snapshots, every=1, name=name)
    callbacks = [
        Log(JsonLines(folder / "metrics.jsonl"), folder=folder),
        Checkpoints(folder / "checkpoints", every=3, snapshots=snapshots),
        Begin(folder, opened, stop_at),
    ]
    plait.fit(model, plait.Plan(dp=2, strategy="full"), Tokens(), steps=STEPS, callbacks=callbacks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    plait.launch(train, options.folder, options.name, options.stop_at, device="cpu", timeout=60)
