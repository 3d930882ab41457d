"""`run.check_memory` and `run.recheck_rate`: a checked run is the same, and ends where a bit flips."""

from __future__ import annotations

import ctypes
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.train_run import train
from plait.engine import Engine
from plait.errors import ConfigError, CorruptionError


def make(folder: Path, **run: Any) -> Config:
    """Four steps of a model of one block on two data-parallel ranks."""
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
            "data": {"source": "random"},
            "train": {"steps": 4, "batch": 4, "microbatches": 2, "validate_batches": 1},
            "parallel": {"dp": 2},
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


def flipping_before_step(step: int) -> AbstractContextManager[Any]:
    """Context in which a bit of rank 1 flips before step number `step`, counted from 0."""
    original = TrainingLoop.run_step

    def run_step(self: TrainingLoop) -> None:
        if self.done == step:
            flip(self.engine)
        original(self)

    return patch.object(TrainingLoop, "run_step", run_step)


def flip_before_saving(config: Config) -> None:
    """Train, and flip a bit right before the first checkpoint is written."""
    original = Engine.compare_memory

    def compare_memory(self: Engine) -> None:
        flip(self)
        original(self)

    with patch.object(Engine, "compare_memory", compare_memory):
        train(config)


CHECKS = {"check_memory": True, "recheck_rate": 1.0}
TOLD = (
    "^rank 1 on host .*: the value of embedding.token.weight changed in memory by one bit, after the "
    "update of step 2, before that of step 3, and"
)


def test_a_checked_run_is_the_same_and_a_flipped_bit_ends_it(thread_ranks: Any, tmp_path: Path) -> None:
    thread_ranks.run(train, make(tmp_path / "off"), ranks=2)
    thread_ranks.run(train, make(tmp_path / "on", **CHECKS), ranks=2)
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    with pytest.raises(CorruptionError, match=TOLD), flipping_before_step(2):
        thread_ranks.run(train, make(tmp_path / "next", **CHECKS), ranks=2)


@pytest.mark.full
def test_a_flipped_bit_is_not_saved(rank_pool: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match=TOLD):
        rank_pool.run(flip_before_saving, make(tmp_path, save_every=2, **CHECKS), ranks=2)
    assert not [*(tmp_path / "checkpoints").glob("step-*")]


def test_the_fields_are_read_and_rates_beyond_one_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.recheck_rate"):
        config_from_arguments(["--run.recheck_rate", "1.5"])
    assert config_from_arguments(["--run.check_memory", "true"]).run.check_memory
