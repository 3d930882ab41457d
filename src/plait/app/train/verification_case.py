"""The verification case for a configuration: its model, first batches and optimizer, for `plait verify`."""

from __future__ import annotations

from functools import partial

from plait.app.config.config import Config
from plait.app.train.build import build_optimizer, trained_part
from plait.app.train.run_data import load_data
from plait.errors import ConfigError
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.options import Mode, VerifyOptions, usual_steps


def verification_case(config: Config, *, mode: Mode, steps: int | None, isolate: bool) -> Case:
    """Return the `Case` for `plait verify`: a configuration's model, optimizer and first batches.

    The learning rate stays at its peak. Raises `DataError` and the other errors of `load_data`.
    """
    data, settings, run = load_data(config), config.train, config.run
    if settings.rates:
        raise ConfigError(
            "train.rates is given, and plait verify compares steps with one learning rate: leave it out, as "
            "by --train.rates '[]'."
        )
    steps = usual_steps(mode) if steps is None else steps
    options = VerifyOptions(
        mode=mode,
        steps=steps,
        weight_decay=settings.matrix_decay,
        optimizer=partial(build_optimizer, settings=settings),
        isolate=isolate,
        resumes=True,
        seed=settings.seed,
    )
    return Case(
        model=trained_part(config, data.vocab),
        loss=cross_entropy,
        batches=[data.training.batch(step, slice(0, settings.batch)) for step in range(steps)],
        options=options,
        device=run.device,
        timeout=run.timeout,
        ranks_as=run.ranks_as,
        ranks_per_gpu=run.ranks_per_gpu,
    )
