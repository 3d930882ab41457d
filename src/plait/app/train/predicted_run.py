"""Prediction of a run's memory and step before it starts, compared with its limit and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn

from plait.app.config.config import Config, configured_decoder, vocabulary
from plait.app.config.train_section import TrainConfig
from plait.app.loop.fastest_work_division import DivisionMemory
from plait.app.loop.work_division import WorkDivision
from plait.app.train.trainer import model_to_train, optimizer_maker
from plait.errors import ConfigError, PlaitError
from plait.estimate.memory.fit_plan import changed_fields, fit_plan
from plait.estimate.memory.memory_report import Memory
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.estimate.memory.whole_parameter_owners import Moments
from plait.estimate.prediction.predicted_model import DecoderModel, PredictedModel
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.prediction.traced_model import traced_model
from plait.estimate.time.hardware import bundled_name
from plait.optimizers.optimizer_makers import takes_engine
from plait.pictures.quantities import seconds_text
from plait.pictures.report.metrics import read_metrics
from plait.pictures.report.run_record import METRICS_FILE
from plait.pictures.report.step_json import read_step
from plait.plan.plan import Plan
from plait.ranks.accelerator import is_accelerator, name_of

GIGA = 1e9
SECTIONS = {"microbatches": "train"}
"""The section of a plan's field in the configuration, where it is not `parallel`."""


def predict_memory(config: Config, model: nn.Module, plan: Plan, device: torch.device) -> Memory:
    """Return each rank's predicted memory. Raises ConfigError where one exceeds `run.memory_limit`.

    The error names the smallest change that fits.
    """
    shape = config.train.batch // plan.dp, config.model.context
    inputs = torch.empty(shape, dtype=torch.int64, device="meta")
    estimator = MemoryEstimator(model, inputs, moments=optimizer_moments(config.train), device=device)
    memory, limit = estimator.estimate(plan), config.run.memory_limit
    if limit is not None and memory.most > limit * GIGA:
        other = fit_plan(estimator, plan, int(limit * GIGA))
        changes = {} if other is None else changed_fields(plan, other)
        named = {f"{SECTIONS.get(field, 'parallel')}.{field}": value for field, value in changes.items()}
        remedy = "set " + " and ".join(f"{name} to {value}" for name, value in named.items())
        if not named:
            remedy = (
                "no strategy, offload or size of micro-batches helps, so take more ranks, or lower "
                f"model.context = {config.model.context}"
            )
        raise ConfigError(
            f"a rank would hold up to {memory.most / GIGA:.3g} GB, but run.memory_limit is {limit:g}: "
            f"{remedy}."
        )
    return memory


def division_memory(config: Config, plan: Plan, vocab: int, device: torch.device) -> DivisionMemory:
    """Return the predictor of ranks' memory that decides which changes of stages, order and rows fit.

    With `run.memory_limit` as its limit. The model is made, on the meta device, when it is first asked.
    """

    @cache
    def estimator() -> MemoryEstimator:
        return MemoryEstimator(
            model_to_train(config, vocab), moments=optimizer_moments(config.train), device=device
        )

    def bytes_of(work: WorkDivision) -> float | None:
        rows = ceil(max(work.rows) / plan.microbatches) * plan.microbatches
        inputs = torch.empty((rows, config.model.context), dtype=torch.int64, device="meta")
        try:
            known = replace(estimator(), inputs=inputs, order_of=lambda *_, **__: (work.order, work.cut))
            return max(rank.most for rank in known.ranks(plan))
        except PlaitError:  # of a model that does not run on meta
            return None

    limit = config.run.memory_limit
    return DivisionMemory(bytes_of, None if limit is None else limit * GIGA)


def optimizer_moments(settings: TrainConfig) -> Moments:
    """Return the number of optimizer state tensors per parameter; for Muon and `Owned` the optimizer's maker.

    It is the argument `moments` of predictions.
    """
    made = optimizer_maker(settings)
    return made if takes_engine(made) else settings.optimizer.moments


def prediction_line(memory: Memory) -> str:
    """Return a line of text about the rank with the largest predicted memory."""
    fullest = max(memory.ranks, key=lambda rank: rank.peak)
    parts = sorted(fullest.at_peak.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{category.value} {size / 1e6:,.1f}" for category, size in parts if size)
    saved = f"; {abs(memory.saving):.0%} {'less' if memory.saving >= 0 else 'more'} than with strategy none"
    saved = saved if memory.plan.strategy != "none" else ""
    return f"Memory: up to {memory.most / 1e6:,.1f} MB of tensors a rank ({shown}{saved})."


def peak_line(memory: Memory, measured: float, device: torch.device) -> str:
    """Return a line that compares the `measured` peak in bytes with the predicted memory of tensors."""
    peak, predicted = f"{measured / 1e6:,.1f} MB", f"{memory.most / 1e6:,.1f} MB were predicted"
    if is_accelerator(device):
        return f"Memory: up to {peak} of tensors allocated on a rank; {predicted}."
    # The peak of a CPU is the resident set of the rank's process, of which tensors are a part.
    return (
        f"Memory: up to {peak} resident in a rank's process, with Python and torch; of tensors {predicted}."
    )


_COMPUTING = ("matrix products", "attention", "element-wise", "recomputation")
_WAITING = (*(f"{axis} communication" for axis in ("tp", "cp", "ep", "pp", "dp")), "bubble")
"""Parts of a prediction's breakdown that the record of a step shows as computing and as blocked."""


def configured_model(config: Config) -> PredictedModel:
    """Return the configured model, for predictions: from its sizes alone where these suffice."""
    decoder = configured_decoder(config)
    if decoder is not None:
        return DecoderModel(decoder)
    model = model_to_train(config, 0 if config.model.folder is not None else vocabulary(config))
    rows = torch.empty(1, config.model.context, dtype=torch.int64, device="meta")
    return traced_model(model, rows, moments=optimizer_moments(config.train))


def predicted_step(config: Config, plan: Plan, device: torch.device) -> Prediction | None:
    """Return the prediction of a run's step on `run.hardware`, or on hardware known by the GPU's name.

    None without either, and for what predictions refuse, unless `run.hardware` is given: then raises
    `PlaitError`, as for a file that cannot be read.
    """
    hardware = config.run.hardware
    if hardware is None and is_accelerator(device):
        hardware = bundled_name(name_of(device))
    if hardware is None:
        return None
    try:
        return predict(configured_model(config), plan, hardware, rows=config.train.batch // plan.dp)
    except PlaitError:
        if config.run.hardware is None:
            return None
        raise


def step_lines(folder: Path, predicted: Prediction) -> Iterator[str]:
    """Yield lines on the measured and predicted time of a step and, with `step.json`, of its parts."""
    seconds = read_metrics(folder / METRICS_FILE).numbers("step_seconds")
    if not seconds:
        return
    middle, expected = median(seconds), predicted.step_seconds
    yield (
        f"Step: {seconds_text(middle)} in the median, {seconds_text(expected)} predicted on "
        f"{predicted.hardware.name} ({expected / middle - 1:+.0%})."
    )
    step = read_step(folder)
    uses = [] if step is None else [dict(one) for _, one in step.uses()]
    if not uses:
        return
    computing, other = (fmean(one[name] for one in uses) for name in ("computing", "other"))
    waiting = fmean(sum(one[name] for name in one if name not in ("computing", "other")) for one in uses)
    # Sums of a simulated step may differ from its end by their rounding.
    guessed = [max(sum(predicted.breakdown[name] for name in names), 0.0) for names in (_COMPUTING, _WAITING)]
    yield (
        "The recorded step, means of all ranks, in brackets as predicted: "
        f"computing {seconds_text(computing)} ({seconds_text(guessed[0])}), "
        f"blocked in communication or the bubble {seconds_text(waiting)} ({seconds_text(guessed[1])}), "
        f"otherwise {seconds_text(other)}."
    )
