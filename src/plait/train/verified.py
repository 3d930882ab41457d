"""What `plait verify` verifies: a configuration's model, its first batches, its optimizer."""

from __future__ import annotations

from functools import partial

from plait.tensor.losses import cross_entropy
from plait.train.config import Config
from plait.train.data import load_data
from plait.train.model import build_model
from plait.train.optimizer import adamw
from plait.verification.case import Case
from plait.verification.options import Mode, VerifyOptions, usual_steps


def case_of(config: Config, *, mode: Mode, steps: int | None, isolate: bool) -> Case:
    """The case that a configuration describes: step after step the batches that training begins with.

    The learning rate stays at its peak. Raises `DataError` and what the data has to say.
    """
    data, settings, run = load_data(config), config.train, config.run
    steps = usual_steps(mode) if steps is None else steps
    options = VerifyOptions(
        mode=mode,
        steps=steps,
        weight_decay=settings.weight_decay,
        optimizer=partial(adamw, settings=settings),
        isolate=isolate,
        seed=settings.seed,
    )
    return Case(
        model=build_model(config.model, data.vocab),
        loss=cross_entropy,
        batches=[data.training.batch(step, slice(0, settings.batch)) for step in range(steps)],
        options=options,
        device=None if run.device == "auto" else run.device,
        timeout=run.timeout,
    )
