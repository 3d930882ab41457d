"""Whether a run fits is told before it starts."""

from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError
from plait.train.build import build_model
from plait.train.config import Config
from plait.train.memory_limit import peak_line, predict_memory, prediction_line

CPU = torch.device("cpu")
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "context": 16}


def config_of(limit: float | None, **parallel: object) -> Config:
    return Config.model_validate(
        {
            "model": SMALL,
            "train": {"batch": 16, "microbatches": 2},
            "parallel": parallel,
            "run": {"memory_limit": limit},
        }
    )


def told(config: Config) -> str:
    return prediction_line(predict_memory(config, build_model(config.model, 256), config.plan(), CPU))


def test_a_line_about_the_rank_that_holds_most() -> None:
    line = told(config_of(None, dp=2, strategy="full"))
    assert line.startswith("Memory: up to ")
    assert "less than with strategy none" in line
    assert "strategy" not in told(config_of(None, dp=2))


def test_what_fits_is_let() -> None:
    assert told(config_of(1.0, dp=2)) == told(config_of(None, dp=2))


def test_what_cannot_fit_needs_more_ranks() -> None:
    with pytest.raises(ConfigError) as caught:
        told(config_of(1e-6, dp=2))
    told_limit, remedy = str(caught.value).split(": ")
    assert told_limit.endswith("but run.memory_limit is 1e-06")
    assert remedy.startswith(
        "no strategy, offload or size of micro-batches helps, so take more ranks, or lower "
    )
    assert remedy.endswith(" model.context = 16.")


def test_what_does_not_fit_is_refused_with_the_smallest_change_that_would() -> None:
    config = config_of(None, dp=2)
    most = predict_memory(config, build_model(config.model, 256), config.plan(), CPU).most
    limit = 0.9 * most / 1e9
    with pytest.raises(ConfigError) as caught:
        told(config_of(limit, dp=2))
    remedy = str(caught.value).split(": set ")[1].rstrip(".")
    changes = dict(change.split(" to ") for change in remedy.split(" and "))
    parallel = {name.partition(".")[2]: value for name, value in changes.items() if "parallel" in name}
    train = {"microbatches": int(changes.get("train.microbatches", 2))}
    assert len(changes) == len(parallel) + ("train.microbatches" in changes)
    changed = config_of(limit, dp=2, **parallel)
    told(changed.model_copy(update={"train": changed.train.model_copy(update=train)}))  # it fits


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    config = config_of(None, dp=2)
    memory = predict_memory(config, build_model(config.model, 256), config.plan(), CPU)
    predicted = f"{memory.most / 1e6:,.1f} MB were predicted."
    assert peak_line(memory, 3e8, CPU).endswith(predicted)
    assert "300.0 MB resident in a rank's process, with Python and torch; of tensors" in peak_line(
        memory, 3e8, CPU
    )
    assert "300.0 MB of tensors allocated on a rank; " in peak_line(memory, 3e8, torch.device("cuda"))
