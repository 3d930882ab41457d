"""`run.hardware`: a run says at its end how its steps compare with their prediction."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from train_runs import make, run

from plait.app.config.config import Config
from plait.app.train.predicted_run import predicted_step, step_lines
from plait.errors import ConfigError
from plait.pictures.report.run_record import read_run
from plait.pictures.report.step_json import RecordedRank, RecordedStep, write_step
from plait.ranks.launch.rank_pool import RankPool


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


def test_lines_have_the_median_step_and_the_means_of_all_ranks(tmp_path: Path) -> None:
    axes = [f"{axis} communication" for axis in ("tp", "cp", "ep", "pp", "dp")]
    names = ["matrix products", "attention", "element-wise", "recomputation", *axes, "bubble", "optimizer"]
    predicted = SimpleNamespace(
        step_seconds=0.25,
        hardware=SimpleNamespace(name="these"),
        breakdown={name: 2**place / 1000 for place, name in enumerate(names)},
    )
    seconds = 0.1, 0.2, 0.9
    rows = [json.dumps({"step": step, "step_seconds": one}) for step, one in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    step = "Step: 200 ms in the median, 250 ms predicted on these (+25%)."
    assert [*step_lines(tmp_path, predicted)] == [step]

    ranks = (
        RecordedRank(
            ((0, "F", 0, 0, 10_000_000),),
            (("pp", 10_000_000, 14_000_000), ("dp", 14_000_000, 16_000_000)),
            {},
        ),
        RecordedRank(((1, "B", 0, 0, 20_000_000),), (("tp", 2_000_000, 4_000_000),), {}),
    )
    write_step(RecordedStep(1, "1f1b", 1, (0, 1), ranks), tmp_path)
    recorded = (
        "The recorded step, means of all ranks, in brackets as predicted: computing 14 ms (15 ms), blocked "
        "in communication or the bubble 4 ms (1.01 s), otherwise 2 ms."
    )
    assert [*step_lines(tmp_path, predicted)] == [step, recorded]


def test_a_step_prediction_for_unknown_hardware_is_refused(tmp_path: Path) -> None:
    config, device = make(tmp_path, dp=2), torch.device("cpu")
    assert predicted_step(on(config, None), config.plan(), device) is None
    predicted = predicted_step(on(config, "h100-sxm"), config.plan(), device)
    assert predicted is not None
    assert predicted.rows == config.train.batch // 2
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        predicted_step(on(config, "nowhere.toml"), config.plan(), device)
