"""A run whose ranks are killed, one in each of its first attempts; rank 0 prints how it ended.

    torchrun --max-restarts 3 ... mortal_run.py FOLDER STEPS KILLS

An attempt gets one step further, saves a checkpoint, and loses a rank; the last one ends with the run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import plait
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.loop import Checkpoints


class Death(Callback):
    """Kills one rank after each of the first `kills` steps, once the checkpoint is written."""

    def __init__(self, checkpoints: Checkpoints, kills: int) -> None:
        self._checkpoints, self._kills = checkpoints, kills

    def after_step(self, run: TrainingLoop) -> None:
        if run.done <= self._kills:
            self._checkpoints.finish()
            dist.barrier()
            if run.mesh.rank == run.done % run.mesh.world:
                os.kill(os.getpid(), signal.SIGKILL)


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = 4

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (self.size, 9), generator=drawn)[rows]
        return tokens[:, :-1], tokens[:, 1:]


def train(folder: Path, steps: int, kills: int) -> float:
    """Return the last loss."""
    model = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=64, context=8)
    checkpoints = Checkpoints(folder, every=1)
    callbacks = [checkpoints, Death(checkpoints, kills)]
    plan = plait.Plan(dp=dist.get_world_size())
    return plait.fit(model, plan, Tokens(), steps=steps, callbacks=callbacks).loss


if __name__ == "__main__":
    losses = plait.launch(train, Path(sys.argv[1]), *map(int, sys.argv[2:]), device="cpu", timeout=60)
    if os.environ.get("RANK", "0") == "0":
        print(f"The last loss is {losses[0]!r} after {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts.")
