"""The predicted step of a run, and its comparison with the measured steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import torch

from plait.app.config.config import Config
from plait.app.config.planned_config import configured_decoder
from plait.errors import PlaitError
from plait.estimate.time.hardware import bundled_name
from plait.estimate.time.prediction import Prediction, predict
from plait.pictures.quantities import seconds_text
from plait.pictures.report.metrics import read_metrics
from plait.pictures.report.recorded_step import StepTimeline, read_step
from plait.pictures.report.run_record import METRICS_FILE
from plait.plan.plan import Plan
from plait.ranks.device import is_accelerator, name_of

_COMPUTING = ("matrix products", "attention", "element-wise", "recomputation")
_WAITING = ("tp communication", "cp communication", "pp communication", "dp communication", "bubble")
"""Parts of a prediction's breakdown that the record of a step shows as computing and as blocked."""


def predicted_step(config: Config, plan: Plan, device: torch.device) -> Prediction | None:
    """Return the prediction of a run's step on `run.hardware`, or on hardware known by the GPU's name.

    None without either, and for models that predictions do not know, unless `run.hardware` is given: then
    raises `ConfigError`, as for a file that cannot be read.
    """
    hardware = config.run.hardware
    if hardware is None and is_accelerator(device):
        hardware = bundled_name(name_of(device))
    if hardware is None:
        return None
    try:
        return predict(configured_decoder(config), plan, hardware, rows=config.train.batch // plan.dp)
    except PlaitError:
        if config.run.hardware is None:
            return None
        raise


def step_lines(folder: Path, predicted: Prediction) -> Iterator[str]:
    """Yield lines on the measured and predicted time of a step, and on the parts of that time.

    Reads `metrics.jsonl` and `step.json` in `folder`; without the latter there is no second line.
    """
    seconds = read_metrics(folder / METRICS_FILE).numbers("step_seconds")
    if not seconds:
        return
    middle, expected = median(seconds), predicted.step_seconds
    yield (
        f"Step: {seconds_text(middle)} in the median, {seconds_text(expected)} predicted on "
        f"{predicted.hardware.name} ({expected / middle - 1:+.0%})."
    )
    step = read_step(folder)
    uses = [] if step is None else [dict(one) for _, one in StepTimeline(step).uses()]
    if not uses:
        return
    computing, other = (fmean(one[name] for one in uses) for name in ("computing", "other"))
    waiting = fmean(sum(one[name] for name in one if name not in ("computing", "other")) for one in uses)
    parts = predicted.breakdown
    guessed = [sum(parts[name] for name in names) for names in (_COMPUTING, _WAITING)]
    measured = [computing, waiting]
    texts = [
        f"{seconds_text(one)} ({seconds_text(guess)})" for one, guess in zip(measured, guessed, strict=True)
    ]
    yield (
        f"The recorded step, means of all ranks, in brackets as predicted: computing {texts[0]}, blocked in "
        f"communication or the bubble {texts[1]}, otherwise {seconds_text(other)}."
    )
