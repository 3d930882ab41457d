"""What a run writes for its report: `run.json`, `events.jsonl`, `step.json`, `ranks.jsonl`, `report.html`."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_runs import make, rows, run

from plait.app.config.config import Config
from plait.app.train.train_run import TrainingResult, _print_end
from plait.errors import ConfigError, NonFiniteError
from plait.pictures.report.run_record import read_run
from plait.pictures.report.warnings import warnings_of
from plait.ranks.launch.rank_pool import RankPool

FIRST = """
import sys
from pathlib import Path
from plait.files import try_lock
file = try_lock(Path(sys.argv[1]))
print(flush=True)
input()
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def without_report(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"report": False})})


def test_a_run_writes_all_that_its_report_needs(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make(tmp_path, pp=2, dp=2, microbatches=1, validate_every=2)
    run(thread_ranks, config)
    record = read_run(tmp_path)
    about, step, ranks = record.description, record.step, record.ranks
    assert record.state == "Finished after step 4 of 4"
    assert about is not None
    assert about.mesh == {"pp": 2, "replicate": 1, "shard": 2, "cp": 1, "tp": 1}
    assert [layer.stage for layer in about.layers] == sorted(layer.stage for layer in about.layers)
    assert about.stage_ranks == (0, 1)
    assert about.lines[1].startswith("Plan: 4 ranks")
    assert "commit" not in about.environment
    assert len(about.memory) == 2
    assert all(sum(one.at_peak.values()) <= one.most for one in about.memory)
    assert step is not None
    assert step.step == 4  # the tenth, or the last one
    for number, rank in enumerate(step.ranks):
        assert {action[0] for action in rank.actions} == {number // 2}
        assert "dp" in rank.traffic
        assert all(start < end for _, start, end in rank.blocked)
    sent = {kind: calls for axis, kind, calls, _, _ in step.traffic() if axis == "pp"}
    assert sent == {"send": 1, "receive": 1}  # the validation of this step is not in it
    assert ranks is not None
    assert ranks.steps == (1, 2, 3, 4)
    assert [max(peaks) for peaks in ranks.memory] == [row["peak_memory_bytes"] for row in rows(tmp_path)]
    page = (tmp_path / "report.html").read_text()
    data = re.search(r'id="data">(.*?)</script>', page)
    assert data is not None
    columns = json.loads(data[1])["runs"][0]["columns"]
    assert columns["loss"] == [row["loss"] for row in rows(tmp_path)]


def test_a_run_that_fails_says_why_in_its_report(thread_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 2"):
        run(thread_ranks, make(tmp_path, lr=1e30, clip=0, warmup=0))
    record = read_run(tmp_path)
    assert record.end is not None
    assert record.end.kind == "failed"
    assert record.end.text.startswith("step 2: the ")
    assert "The run failed: step 2: the " in (tmp_path / "report.html").read_text()


def test_a_run_that_starts_over_keeps_the_files_of_the_one_before(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where two follow, the second writes no report: none of the first is left in its place."""
    run(thread_ranks, make(tmp_path))
    before = {
        name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "report.html", "config.json")
    }
    run(thread_ranks, without_report(make(tmp_path, steps=2, warmup=1)))
    kept = tmp_path / "earlier" / "1"
    assert f"The files of the run before are in {kept}." in capsys.readouterr().out
    assert {name: (kept / name).read_bytes() for name in before} == before
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "step.json").exists()
    assert [event.kind for event in read_run(tmp_path).events] == ["start", "finished"]
    first, second = read_run(kept), read_run(tmp_path)
    assert (first.metrics.steps, second.metrics.steps) == ((1, 2, 3, 4), (1, 2))
    assert first.description.id != second.description.id != ""


def test_a_resumed_run_has_the_same_identity_and_files(thread_ranks: RankPool, tmp_path: Path) -> None:
    run(thread_ranks, make(tmp_path, steps=2, warmup=1))
    before = read_run(tmp_path)
    config = make(tmp_path, steps=3, warmup=1)
    resumed = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    run(thread_ranks, resumed)
    after = read_run(tmp_path)
    assert after.description.id == before.description.id != ""
    assert after.description.started >= before.description.started
    assert after.metrics.steps == (1, 2, 3)
    assert not (tmp_path / "earlier").exists()


def test_two_runs_at_once_in_one_folder_are_refused_by_name(thread_ranks: RankPool, tmp_path: Path) -> None:
    """The first is another process; nothing of it is touched."""
    (tmp_path / "config.json").write_text("of the first")
    with subprocess.Popen([sys.executable, "-c", FIRST, str(tmp_path / "run.lock")], **PIPES) as first:
        first.stdout.readline()
        with pytest.raises(
            ConfigError, match=rf"in use by another run, process {first.pid} on .* since 20"
        ) as told:
            run(thread_ranks, make(tmp_path, dp=2, microbatches=1))
        assert str(told.value).startswith(f"run.dir = {str(tmp_path)!r} is in use")
        first.communicate("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "run.lock"]
    run(thread_ranks, make(tmp_path))  # it has ended
    assert not (tmp_path / "run.lock").exists()


def test_a_checkpoint_that_cannot_be_written_is_a_warning_of_the_report(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("plait.checkpoint.save_task.write_file", full)
    run(thread_ranks, make(tmp_path))
    # Others may be told too: on a busy machine a step waits for its data.
    (told,) = (
        one for one in warnings_of(read_run(tmp_path)) if one.startswith("After step 4: the checkpoint ")
    )
    assert "No space left" in told


def test_the_end_of_a_run_says_where_things_are_and_how_to_go_on(tmp_path: Path) -> None:
    for stopped, saved, every, last in (
        (15, True, 5, "Stopped after step 7: go on with --run.resume auto."),
        (15, False, 5, "Stopped after step 7."),
        (15, True, None, "Stopped after step 7."),
        (
            0,
            True,
            5,
            f"Checkpoints are in {tmp_path / 'checkpoints'}; `plait checkpoint export` writes them for",
        ),
        (0, False, 5, f"Metrics are in m; the report is {tmp_path / 'report.html'}."),
    ):
        said: list[str] = []
        config = Config.model_validate({"run": {"dir": tmp_path, "save_every": every}})
        result = TrainingResult(7, 1.0, None, "text", Path("m"), {}, stopped, saved, reported=True)
        reporter: Any = SimpleNamespace(print=said.append)
        _print_end(config, result, None, None, 0.0, None, reporter)  # type: ignore[arg-type]
        assert said[0] == "\ntext\n"
        assert said[1].startswith("Metrics are in m; the report is ")
        assert said[-1].startswith(last)
        assert len(said) == 2 + bool(stopped or saved)
