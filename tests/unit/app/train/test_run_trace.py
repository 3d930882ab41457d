"""`run.trace`: one step's pictures beside the metrics, and a line about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.train import run_callbacks
from plait.app.train.train_run import train
from plait.errors import ConfigError
from plait.ranks.launch.rank_pool import RankPool

LINE = re.compile(
    r"Trace of step 2: makespan ([\d,.]+) ms \(([\d,.]+) simulated with its costs\), "
    r"bubble [\d.]+% \([\d.]+%\), in trace.json, trace.svg, trace.html\."
)


def make(folder: Path, **run: Any) -> Config:
    """Three steps of a model of one block over two stages."""
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
            "data": {"source": "random"},
            "train": {"steps": 3, "batch": 8, "microbatches": 2, "validate_batches": 1},
            "parallel": {"pp": 2},
            "run": {"dir": folder, "tensorboard": False, "progress": False} | run,
        }
    )


def test_a_traced_step_is_drawn_and_its_file_named(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread_ranks.run(train, make(tmp_path, trace=2), ranks=2)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("Trace")]
    match = LINE.fullmatch(line)
    assert match
    assert lines.index(line) < len(lines) - 2, "when the step is done, not at the end"

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["schedule"] == "1f1b: 2 ranks, 2 micro-batches; step 2 as it was"
    actions = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(action["name"] for action in actions) == sorted(
        ["0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]
    )
    length = max(action["ts"] + action["dur"] for action in actions)
    assert float(match[1].replace(",", "")) == pytest.approx(length / 1e3, abs=0.06)
    assert "step 2 as it was" in (tmp_path / "trace.svg").read_text()
    assert "step 2 as it was" in (tmp_path / "trace.html").read_text()


def test_nothing_is_recorded_unless_it_is_asked_for(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread_ranks.run(train, make(tmp_path), ranks=2)
    assert "Trace" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("trace*")) == []


def test_a_traced_step_that_is_over_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_callbacks, "write_schedule", lambda *_: None)
    told: list[str] = []
    loop: Any = SimpleNamespace(done=2, tell=told.append, engine=None, mesh=None)
    for trace in (0, 2, 3):
        run_callbacks.Recordings(make(tmp_path, trace=trace)).begin(loop)
    assert told == ["run.trace = 2 does nothing: the run goes on after step 2."]


def test_the_field_trace_is_read_and_checked() -> None:
    assert config_from_arguments(["--run.trace", "10"]).run.trace == 10
    assert Config().run.trace == 0
    told = r"run.trace = 9 is more than train.steps = 3: set run.trace to at most 3\."
    with pytest.raises(ConfigError, match=told):
        config_from_arguments(["--run.trace", "9", "--train.steps", "3"])
    with pytest.raises(ConfigError, match=r"run.trace is -1 .*: give a whole number of at least 0"):
        config_from_arguments(["--run.trace", "-1"])
