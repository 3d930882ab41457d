"""`run.hardware`: a run says at its end how its steps compare with their prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import make, run

from plait.comm.rank_pool import RankPool
from plait.errors import ConfigError
from plait.report.record import read_run
from plait.train.config import Config
from plait.train.predicted_step import predicted_step


def on(config: Config, hardware: str | None) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"hardware": hardware})})


def test_a_run_compares_its_steps_with_the_prediction(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on(make(tmp_path, pp=2, microbatches=2), "h100-sxm")
    run(thread_ranks, config)
    lines = capsys.readouterr().out.splitlines()
    (step,) = (line for line in lines if line.startswith("Step: "))
    assert " predicted on h100-sxm (" in step
    (recorded,) = (line for line in lines if line.startswith("The recorded step"))
    assert "computing" in recorded
    about = read_run(tmp_path).description
    assert about is not None
    assert about.predicted_seconds is not None
    assert "predicted" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_predicted_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    config, device = make(tmp_path), torch.device("cpu")
    assert predicted_step(on(config, None), config.plan(), device) is None
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        predicted_step(on(config, "nowhere.toml"), config.plan(), device)
