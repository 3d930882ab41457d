"""`run.stragglers` and `run.rebalance`: compared ranks in the metrics, and files that follow a new cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_runs import make, rows

import plait.app.train.train_run as train_run
from parity.slowed import Slowed
from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.loop.straggler_callback import Stragglers
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.train_run import train
from plait.errors import ConfigError
from plait.ranks.launch.rank_pool import RankPool


class SlowedStragglers(Stragglers):
    """With a rank 1 that is at half speed from the second step, by a clock of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._slowed = Slowed(lambda rank, step: 2.0 if rank == 1 and step > 1 else 1.0)

    def before_step(self, run: TrainingLoop) -> None:
        self._slowed.before_step(run)

    def replanned(self, run: TrainingLoop) -> None:
        super().replanned(run)
        self._slowed.replanned(run)

    def begin(self, run: TrainingLoop) -> None:
        super().begin(run)
        self._slowed.begin(run)


def rebalanced(folder: Path, **options: object) -> Config:
    model: dict[str, object] = {"layers": 3}
    config = make(folder, pp=2, model=model, steps=16, **options)
    run = config.run.model_copy(update={"rebalance": True, "snapshot_every": 4, "snapshot_folder": folder})
    return config.model_copy(update={"run": run})


def test_a_slow_rank_is_named_in_the_events_and_the_schedule_follows(
    thread_ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_run, "Stragglers", SlowedStragglers)
    thread_ranks.run(train, rebalanced(tmp_path), ranks=2)
    told = capsys.readouterr().out
    assert "WARNING: rank 1 (host " in told
    assert "Rebalanced after step 12: stages of " in told
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "rank 1 (host" in event["text"]] == [12]
    compared = [row["step"] for row in rows(tmp_path) if "slowness" in row]
    assert compared == [4, 8, 12, 16]
    assert rows(tmp_path)[11]["slowest_rank"] == 1
    assert rows(tmp_path)[11]["slowness"] == pytest.approx(2.0, rel=0.1)
    assert len(rows(tmp_path)) == 16


def test_ranks_are_compared_by_default_and_one_alone_is_not(thread_ranks: RankPool, tmp_path: Path) -> None:
    thread_ranks.run(train, make(tmp_path / "two", dp=2), ranks=2)
    thread_ranks.run(train, make(tmp_path / "one"), ranks=1)
    assert [row["step"] for row in rows(tmp_path / "two") if "slowness" in row] == [4]
    assert not [row for row in rows(tmp_path / "one") if "slowness" in row]


def test_the_fields_stragglers_and_rebalance_are_read_and_checked() -> None:
    config = config_from_arguments(["--run.stragglers", "8", "--run.rebalance", "true"])
    assert (config.run.stragglers, config.run.rebalance) == (8, True)
    assert (Config().run.stragglers, Config().run.rebalance) == (4, False)
    with pytest.raises(ConfigError, match=r"run\.stragglers is 0, and no slow rank is found"):
        config_from_arguments(["--run.stragglers", "0", "--run.rebalance", "true"])
