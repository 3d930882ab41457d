"""The callback `WrongBits`, in a run whose engine is replaced between two steps."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.app.loop.builtin_callbacks import WrongBits
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.errors import CorruptionError
from plait.plan.plan import Plan


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = 4

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(64, (self.size, 9), generator=torch.Generator().manual_seed(step))[rows]
        return tokens[:, :-1], tokens[:, 1:]


class Disturbance(Callback):
    """Reshards after the first step, and changes a parameter unnoticed after the second."""

    def after_step(self, run: TrainingLoop) -> None:
        if run.done == 1:
            run.reshard(Plan(microbatches=2, strategy="full"))
        if run.done == 2:
            parameter = next(iter(run.engine.parameters()))
            parameter.detach().numpy().view("uint8").reshape(-1)[3] ^= 1


def test_wrong_bits_are_found_in_the_memory_of_an_engine_that_replaced_another() -> None:
    model = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=64, context=8)
    with pytest.raises(CorruptionError, match="changed in memory by one bit, after the update of step 2"):
        plait.fit(model, Plan(), Tokens(), steps=4, callbacks=[WrongBits(), Disturbance()])
