"""Prediction of a run's memory before it starts, and its check against `run.memory_limit`."""

from __future__ import annotations

import torch
from torch import nn

from plait.app.config.config import Config
from plait.errors import ConfigError
from plait.estimate.memory.fit_plan import changed_fields, fit_plan
from plait.estimate.memory.memory_report import Memory
from plait.estimate.memory.predicted_memory import MemoryEstimator
from plait.plan.plan import Plan
from plait.ranks.device import is_accelerator

GIGA = 1e9
SECTIONS = {"microbatches": "train"}
"""The section of a plan's field in the configuration, where it is not `parallel`."""


def predict_memory(config: Config, model: nn.Module, plan: Plan, device: torch.device) -> Memory:
    """Return the predicted memory of each rank.

    Raises `ConfigError` where a rank exceeds `run.memory_limit`, with the smallest change that fits.
    """
    shape = config.train.batch // plan.dp, config.model.context
    inputs = torch.empty(shape, dtype=torch.int64, device="meta")
    estimator = MemoryEstimator(model, inputs, moments=config.train.optimizer.moments, device=device)
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


def prediction_line(memory: Memory) -> str:
    """Return a line of text about the rank with the largest predicted memory."""
    fullest = max(memory.ranks, key=lambda rank: rank.peak)
    parts = sorted(fullest.at_peak.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{category.value} {size / 1e6:,.1f}" for category, size in parts if size)
    saved = f"; {abs(memory.saving):.0%} {'less' if memory.saving >= 0 else 'more'} than with strategy none"
    saved = saved if memory.plan.strategy != "none" else ""
    return f"Memory: up to {memory.most / 1e6:,.1f} MB of tensors a rank ({shown}{saved})."


def peak_line(memory: Memory, measured: float, device: torch.device) -> str:
    """Return a line of text that compares the `measured` peak in bytes with the predicted memory of tensors.

    On a GPU both count tensors. On a CPU the peak is the resident set of the rank's process, of which tensors
    are a part.
    """
    peak, predicted = f"{measured / 1e6:,.1f} MB", f"{memory.most / 1e6:,.1f} MB were predicted"
    if is_accelerator(device):
        return f"Memory: up to {peak} of tensors allocated on a rank; {predicted}."
    return (
        f"Memory: up to {peak} resident in a rank's process, with Python and torch; of tensors {predicted}."
    )
