"""`run.guard` and `run.check_replicas`: nothing changes but what is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.train.train_run import TrainingResult, train
from plait.app.train.trainer import Trainer
from plait.engine import Engine
from plait.errors import ConfigError, PlaitError
from plait.ranks import mesh
from plait.ranks.launch.rank_pool import RankPool


def make(folder: Path, *, pp: int = 2, **run: Any) -> Config:
    """Four steps of a model of one block over tp=2; its head is tied to the embedding."""
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
            "data": {"source": "random"},
            "train": {"steps": 4, "batch": 4, "microbatches": 2, "validate_batches": 1},
            "parallel": {"pp": pp, "tp": 2},
            "run": {"dir": folder, "tensorboard": False, "progress": False} | run,
        }
    )


def numbers(folder: Path) -> list[dict[str, float]]:
    """What a step computed, without what it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "grad_norm", "lr", "validation_loss")
    return [{key: row[key] for key in kept if key in row} for row in rows]


def refusal(config: Config) -> str:
    try:
        train(config)
    except PlaitError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.full
def test_a_guarded_run_is_the_same_to_the_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    """And compares its replicas after steps 2 and 4."""

    def body(config: Config) -> tuple[TrainingResult, int, bool]:
        made: list[bool] = []
        original = mesh.Mesh.__init__

        def remembering(self: mesh.Mesh, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            made.append(self.guarded)

        with (
            patch.object(mesh.Mesh, "__init__", remembering),
            patch.object(Engine, "check_replicas", autospec=True, side_effect=Engine.check_replicas) as check,
        ):
            report = train(config)
        assert all(call.args[1] is not None for call in check.call_args_list), "with the optimizer"
        return report, check.call_count, all(made)

    guarded = rank_pool.run(body, make(tmp_path / "on", guard=True, check_replicas=2), ranks=4)
    plain = rank_pool.run(body, make(tmp_path / "off"), ranks=4)
    assert [(checks, made) for _, checks, made in guarded] == [(2, True)] * 4
    assert [(checks, made) for _, checks, made in plain] == [(0, False)] * 4
    assert numbers(tmp_path / "on") == numbers(tmp_path / "off")
    assert len(numbers(tmp_path / "on")) == 4


@pytest.mark.full
def test_a_parameter_that_drifts_on_one_rank_ends_the_run(rank_pool: RankPool, tmp_path: Path) -> None:
    def body(config: Config) -> str:
        original = Trainer.step

        def drifting(self: Trainer, step: int) -> Any:
            answer = original(self, step)
            if torch.distributed.get_rank() == 3 and step == 1:
                dict(self.engine.named_parameters())["head.norm.weight"].data[0] += 1e-6
            return answer

        with patch.object(Trainer, "step", drifting):
            return refusal(config)

    (message,) = set(rank_pool.run(body, make(tmp_path, check_replicas=2), ranks=4))
    told = r"ReplicaError: step 2: the value of head.norm.weight is .* rank 3 \(pp 1, tp 1\); 1 of the 10 "
    assert re.match(told, message)


def test_a_region_that_is_entered_with_something_else_ends_the_run(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    """The norm before a region is whole on both ranks of tp; on one of them it drifts."""
    original = Trainer.__init__

    def drifting(self: Trainer, *arguments: Any) -> None:
        original(self, *arguments)
        if self.engine.mesh.rank == 1:
            dict(self.engine.named_parameters())["blocks.0.attention.norm.weight"].data[0] += 1e-6

    with patch.object(Trainer, "__init__", drifting):
        (message,) = set(thread_ranks.run(refusal, make(tmp_path, pp=1, guard=True), ranks=2))
        told = (
            r"CommunicationError: in 0F0: the ranks of tp do not agree \(rank 0: enter a region .*; rank 1: "
        )
        assert re.match(told, message)
        assert thread_ranks.run(refusal, make(tmp_path, pp=1), ranks=2) == ["none"] * 2  # nobody looks


def test_the_fields_guard_and_check_replicas_are_read_and_checked() -> None:
    config = config_from_arguments(["--run.guard", "true", "--run.check_replicas", "10"])
    assert (config.run.guard, config.run.check_replicas) == (True, 10)
    assert (Config().run.guard, Config().run.check_replicas) == (False, 0)
    with pytest.raises(ConfigError, match=r"run.check_replicas is -1 .*: give a whole number of at least 0"):
        config_from_arguments(["--run.check_replicas", "-1"])
