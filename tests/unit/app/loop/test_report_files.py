"""`Report` writes all that the page of a run shows, in a loop of one's own."""

from __future__ import annotations

import json
import os
import platform
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.app.loop.describe_run import command_line, plan_line
from plait.engine import Recording
from plait.loop import Callback, Checkpoints, Progress, Report, TrainingLoop
from plait.package import version_of
from plait.pictures.report.run_record import read_run
from plait.pictures.report.warnings import warnings_of
from plait.plan.plan import Plan
from plait.ranks.exchange_with_supervisor import WorldChange
from plait.ranks.launch.rank_pool import RankPool

PLAN = Plan(pp=2, dp=2, microbatches=2)


class RecordsEachStep(Callback):
    """Records every step itself, around the one that the report records. The folders are locked meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.makespans: list[float] = []
        self._stack, self._recording = ExitStack(), None

    def before_step(self, run: TrainingLoop) -> None:
        assert (self._folder / "run.lock").exists()
        assert (self._folder / "checkpoints" / "checkpoints.lock").exists()
        self._recording: Recording | None = self._stack.enter_context(run.engine.recording())

    def submitted(self, run: TrainingLoop) -> None:
        self._stack.close()
        assert self._recording is not None
        self.makespans.append(self._recording.timeline().makespan)
        if len(self.makespans) == 2:
            run.tell("WARNING: two steps are done.")


def train(folder: Path, steps: int) -> int:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    loader = plait.Loader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch=8)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    recorded = RecordsEachStep(folder)
    checkpoints = Checkpoints(folder / "checkpoints", every=2)
    callbacks = [Report(folder, step=3), Progress(), recorded, checkpoints]
    plait.fit(model, PLAN, loader, steps=steps, validation=loader, validate_every=1, callbacks=callbacks)
    return len(recorded.makespans)


def test_a_plan_is_described_in_one_sentence() -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    long = Plan(pp=2, dp=4, cp=2, tp=2, microbatches=2, replicate=2, strategy="full", offload="full")
    for plan, rows, told in [
        (
            Plan(),
            3,
            "1 rank on cpu (pp 1 × dp 1 × tp 1), schedule 1f1b, 3 sequences a step in 1 × 1 micro-batch.",
        ),
        (
            Plan(dp=2),
            8,
            "2 ranks on cpu (pp 1 × dp 2 × tp 1), schedule 1f1b, 8 sequences a step in 2 × 1 micro-batches.",
        ),
        (
            Plan(dp=4, ep=2, etp=2),
            4,
            "4 ranks on cpu (pp 1 × dp 4 × tp 1, experts over ep 2 × etp 2), schedule 1f1b, 4 sequences a "
            "step in 4 × 1 micro-batches.",
        ),
        (
            long,
            16,
            "32 ranks on cpu (pp 2 × dp 4 × cp 2 × tp 2, strategy full in 2 copies, reduced last, "
            "offload full), schedule 1f1b, 16 sequences a step in 4 × 2 micro-batches.",
        ),
    ]:
        assert plan_line(plan, mesh, rows) == f"Plan: {told}"


def test_a_run_of_fit_has_a_whole_report(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("a" * 40)
    assert thread_ranks.run(train, tmp_path, 4, ranks=4) == [4] * 4
    record = read_run(tmp_path)
    about, step, ranks = record.description, record.step, record.ranks
    assert about is not None
    assert step is not None
    assert ranks is not None
    assert record.state == "Finished after step 4"
    (line,) = about.lines
    assert line.startswith("Plan: 4 ranks on cpu (pp 2 × dp 2 × tp 1), schedule 1f1b, 8 sequences a step")
    assert about.environment == {
        **{name: version_of(name) for name in ("plait", "torch", "numpy", "safetensors")},
        "Python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "device of rank 0": "CPU",
        "command": command_line(),
        "commit": "a" * 40,
        "ranks": "4 threads, started by plait",
        "threads of a rank": str(torch.get_num_threads()),
        "communication": "within one host",
    }
    assert about.stage_ranks == (0, 1)
    assert step.step == 3
    assert {action[2] for rank in step.ranks for action in rank.actions} == {0, 1}
    messages = {kind: calls for axis, kind, calls, _, _ in step.traffic() if axis == "pp"}
    assert messages == {"send": 2, "receive": 2}  # those of a validation would be more
    assert ranks.steps == (1, 2, 3, 4)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all({"validation_loss", "data_seconds"} <= set(row) for row in rows)
    assert [event.text for event in record.events if event.kind == "warning"] == ["two steps are done."]
    page = (tmp_path / "report.html").read_text()
    assert "<h2>A step</h2>" in page
    assert "<dt>rows</dt><dd>32</dd>" in page  # its targets are no sequences of tokens


def train_sparse(folder: Path) -> None:
    inputs = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    loader = plait.Loader(TensorDataset(inputs, torch.zeros(4, 3, dtype=torch.int64)), batch=4)
    with torch.device("meta"):
        model = nn.Sequential(plait.MixtureOfExperts(8, 4, experts=3, top_k=2), nn.Linear(8, 2))
    plait.fit(model, Plan(dp=2, ep=2), loader, steps=1, callbacks=[Report(folder)])


def test_the_report_of_a_run_with_divided_experts_can_be_read(thread_ranks: RankPool, tmp_path: Path) -> None:
    thread_ranks.run(train_sparse, tmp_path, ranks=2)
    about = read_run(tmp_path).description
    assert about is not None
    assert about.world == 2
    assert "experts over ep 2 × etp 1" in about.lines[0]
    (experts,) = (one for one in about.tensors if one.name == "0.experts.down_proj")
    assert sorted(box[1][0] for shard in experts.pieces for box in shard.boxes) == [1, 2]


def test_a_resumed_run_goes_on_in_the_same_files(thread_ranks: RankPool, tmp_path: Path) -> None:
    thread_ranks.run(train, tmp_path, 2, ranks=4)
    thread_ranks.run(train, tmp_path, 5, ranks=4)
    record = read_run(tmp_path)
    assert record.metrics.steps == (1, 2, 3, 4, 5)
    assert [(event.kind, event.step) for event in record.events if event.kind != "warning"] == [
        ("start", 0), ("finished", 2), ("start", 2), ("finished", 5),
    ]  # fmt: skip


def test_a_run_that_goes_on_with_more_ranks_has_not_failed(tmp_path: Path) -> None:
    class Leave(Callback):
        def after_step(self, run: TrainingLoop) -> None:
            raise WorldChange("leaves the world after step 1, for one of 2 ranks")

    with torch.device("meta"):
        model = nn.Linear(6, 2)
    data = plait.Loader(TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)), batch=8)
    with pytest.raises(WorldChange):
        plait.fit(nn.Sequential(model), Plan(), data, steps=4, callbacks=[Report(tmp_path), Leave()])
    record = read_run(tmp_path)
    assert [(event.kind, event.step) for event in record.events] == [("start", 0), ("resized", 1)]
    assert record.events[1].text == "leaves the world after step 1, for one of 2 ranks"
    assert record.state == "Running: step 1"
    assert not any("failed" in warning for warning in warnings_of(record))
    assert not (tmp_path / "report.html").exists()
