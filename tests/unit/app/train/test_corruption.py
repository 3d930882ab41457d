"""`run.check_memory` and `run.recheck_rate`: a checked run is the same, and ends where a bit flips."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.train_run import train
from plait.engine import Engine
from plait.errors import ConfigError, CorruptionError, PlanError


def make(folder: Path, *, dp: int = 2, **run: Any) -> Config:
    """Four steps of a model of one block on two data-parallel ranks."""
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
            "train": {"steps": 4, "batch": 4, "microbatches": 2, "validate_batches": 1},
            "parallel": {"dp": dp},
            "run": {"dir": folder, "tensorboard": False, "progress": False, "report": False} | run,
        }
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def flip(engine: Engine) -> None:
    """Flip a bit of the first parameter of rank 1."""
    parameter = next(engine.parameters())
    if engine.mesh.rank == 1:
        ctypes.c_uint8.from_address(parameter.data_ptr() + 6).value ^= 4


def flip_before_step(config: Config, step: int) -> None:
    """Train, and flip a bit before step number `step`, counted from 0."""
    original = TrainingLoop.run_step

    def run_step(self: TrainingLoop) -> None:
        if self.done == step:
            flip(self.engine)
        original(self)

    with patch.object(TrainingLoop, "run_step", run_step):
        train(config)


def flip_before_saving(config: Config) -> None:
    """Train, and flip a bit right before the first checkpoint is written."""
    original = Engine.compare_memory

    def compare_memory(self: Engine) -> None:
        flip(self)
        original(self)

    with patch.object(Engine, "compare_memory", compare_memory):
        train(config)


def test_a_checked_run_is_the_same_and_a_flipped_bit_ends_it_before_it_is_used_or_saved(
    rank_pool: Any, tmp_path: Path
) -> None:
    checks = {"check_memory": True, "recheck_rate": 1.0}
    rank_pool.run(train, make(tmp_path / "off"), ranks=2)
    rank_pool.run(train, make(tmp_path / "on", **checks), ranks=2)
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    told = "^rank 1 on host .*: the value of embedding.token.weight changed in memory by one bit, after"
    with pytest.raises(CorruptionError, match=f"{told} the update of step 2, before that of step 3, and"):
        rank_pool.run(flip_before_step, make(tmp_path / "next", **checks), 2, ranks=2)
    with pytest.raises(CorruptionError, match=f"{told} the update of step 2, before that of step 3, and"):
        rank_pool.run(flip_before_saving, make(tmp_path / "saved", save_every=2, **checks), ranks=2)
    assert not [*(tmp_path / "saved" / "checkpoints").glob("step_*/manifest.json")]


def test_rates_beyond_one_and_rechecks_on_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.recheck_rate"):
        config_from_arguments(["--run.recheck_rate", "1.5"])
    assert config_from_arguments(["--run.check_memory", "true"]).run.check_memory
    with pytest.raises(PlanError, match=r"recheck_rate is 0.5, but with plan.dp = 1"):
        train(make(tmp_path, dp=1, recheck_rate=0.5))
