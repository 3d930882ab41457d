from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_metrics, write_plan, write_ranks, write_recorded_step

from plait.errors import ConfigError, DataError
from plait.pictures.quantities import bytes_text
from plait.pictures.report.charts import figures_of
from plait.pictures.report.page import read_runs, write_report
from plait.pictures.report.run_json import PlannedTensor, PredictedRank, TensorShard, write_description
from plait.pictures.report.run_record import read_run, write_event
from plait.pictures.report.sections import samples_section
from plait.pictures.report.step_json import RecordedRank, write_step
from plait.pictures.report.warnings import stragglers, warnings_of


def test_a_folder_with_metrics_alone_is_read_as_a_run(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 5)
    run = read_run(tmp_path / "run")
    assert (run.name, run.state, run.description, run.step, run.ranks) == ("run", "5 steps", None, None, None)
    assert read_run(tmp_path / "run" / "metrics.jsonl").metrics == run.metrics
    assert list(warnings_of(run)) == []


def test_all_files_of_a_run_are_read_back(tmp_path: Path) -> None:
    config = write_plan(tmp_path, pp=2, tp=2, dp=2, strategy="full")
    rows = write_metrics(tmp_path, 20)
    write_ranks(tmp_path, rows, 8)
    step = write_recorded_step(tmp_path, 2, 4)
    run = read_run(tmp_path)
    assert run.step == step
    assert run.config_field("parallel.tp") == config.parallel.tp == 2
    assert dict(run.settings())["parallel.strategy"] == "full"
    assert run.ranks is not None
    assert run.ranks.peaks == tuple(900_000_000 + rank for rank in range(8))
    about = run.description
    assert about is not None
    assert about.world == 8
    assert about.mesh == {"pp": 2, "replicate": 1, "shard": 2, "cp": 1, "tp": 2}
    assert [layer.path for layer in about.layers][:3] == ["embedding", "blocks.0.attention", "blocks.0.mlp"]
    assert sum(layer.elements for layer in about.layers) > 1024 * 256


def test_the_state_of_a_run_tells_running_finished_and_died_apart(tmp_path: Path) -> None:
    write_plan(tmp_path)
    write_metrics(tmp_path, 300)
    assert read_run(tmp_path).state == "Running: step 300 of 300"
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 1000,) * 2)
    died = read_run(tmp_path)
    assert died.state == "Ended without saying why, after step 300 of 300"
    assert "its process was killed" in next(warnings_of(died))
    write_event(tmp_path, "failed", 300, "replicas of head.weight differ on ranks 0 and 1")
    failed = read_run(tmp_path)
    assert failed.state == "Failed after step 300 of 300"
    assert next(warnings_of(failed)) == "The run failed: replicas of head.weight differ on ranks 0 and 1."
    write_event(tmp_path, "start", 200, "")  # resumed
    assert read_run(tmp_path).end is None
    write_event(tmp_path, "finished", 300, "")
    assert read_run(tmp_path).state == "Finished after step 300 of 300"


def test_failed_checkpoints_slow_ranks_and_loss_spikes_are_warnings(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2, dp=4)
    rows = write_metrics(tmp_path, 40)
    write_ranks(tmp_path, rows, 8, slow=6)
    write_event(tmp_path, "warning", 20, "the checkpoint cannot be written (no space left on device)")
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[3] = '{"step": 4, "loss": 2.0, "grad_norm": null}'
    file.write_text("\n".join([*lines, '{"step"']))
    told = list(warnings_of(read_run(tmp_path)))
    assert [text.split(":")[0] for text in told] == [
        "After step 20",
        "1 steps changed no parameter, because gradients overflowed in fp16",
        "Rank 6 is slower than its peers",
        "1 damaged lines of the metrics were left out.",
    ]
    for world, slow in ((8, None), (4, 3)):  # of 8 ranks nobody is slow; 4 are those of another plan
        write_ranks(tmp_path, rows, world, slow)
        assert stragglers(read_run(tmp_path)) == []


def test_why_a_run_is_slow_is_a_warning(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2, dp=2)
    rows = [row | {"data_seconds": 0.05} for row in write_metrics(tmp_path, 40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = write_recorded_step(tmp_path, 2, 2)  # 8 micro-batches, even stages
    assert [text.split(" of ")[0] for text in warnings_of(read_run(tmp_path))] == ["A step waits 50 ms"]
    shorter = [
        replace(rank, actions=tuple((*action[:4], action[4] - 700_000) for action in rank.actions))
        for rank in step.ranks[2:]
    ]
    write_step(replace(step, microbatches=2, ranks=(*step.ranks[:2], *shorter)), tmp_path)
    uneven, bubble, _ = warnings_of(read_run(tmp_path))
    assert uneven.startswith("The stages are uneven: pp 0 computes for ")
    assert bubble == (
        "With 2 micro-batches on 2 ranks of pp, 1f1b leaves 33% of the time unused even if the stages are "
        "even: with microbatches = 8 it would be 11%."
    )


def test_memory_of_a_device_is_compared_with_what_was_predicted(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2)
    write_metrics(tmp_path, 2)  # at most 1,000,000,002 bytes
    about = read_run(tmp_path).description
    assert about is not None
    for accelerated, most, told in ((True, 5 * 10**8, 1), (True, 10**9, 0), (False, 5 * 10**8, 0)):
        ranks = tuple(PredictedRank(rank, most - rank, 1, {"weights": 1}) for rank in range(2))
        write_description(replace(about, accelerated=accelerated, memory=ranks), tmp_path)
        run = read_run(tmp_path)
        assert len(list(warnings_of(run))) == told
        predicted, measured = (one for one in figures_of(run) if one.name.startswith(("tensors", "resident")))
        assert predicted[:2] == ("tensors, predicted", bytes_text(most))
        name = "tensors, measured" if accelerated else "resident memory"
        assert measured[:2] == (name, bytes_text(1_000_000_002))
        if told:
            assert "100% more than" in next(warnings_of(run))


@pytest.mark.parametrize("name", ["run.json", "step.json", "config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_plan(tmp_path)
    write_metrics(tmp_path, 2)
    write_recorded_step(tmp_path, 1, 1)
    (tmp_path / name).write_text("{")
    with pytest.raises(DataError, match="is damaged") as raised:
        read_run(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / name} is damaged (")


_NOTHING = RecordedRank((), (), {})
RUN: dict[str, dict[str, Any]] = {
    "mesh: it has not the axes pp, replicate": {"mesh": {"pp": 2, "tp": 1}},
    "or more than 1,048,576 ranks": {
        "mesh": dict.fromkeys(("replicate", "shard", "cp", "tp"), 1024) | {"pp": 2}
    },
    "stage_ranks: there are no stages": {"stage_ranks": ()},
    "stage_ranks: there are no stages, or": {"layers": ()},
    "or one runs on no rank of pp": {"stage_ranks": (0, 2)},
    "layers: one is in no stage": {"stage_ranks": (0,)},
    "memory: it has a rank that there is not": {"memory": (PredictedRank(2, 1, 1, {}),)},
    r"tensors\.weight: it has no shards": {"tensors": (PlannedTensor("weight", (4,), (0,), ()),)},
    r"tensors\.weight: .* or of other dims": {
        "tensors": (PlannedTensor("weight", (4,), (0,), (TensorShard((((0, 0), (4, 1)),)),)),)
    },
}
"""What a description of two ranks of pp is refused for, and the fields that are changed."""
STEP: dict[str, dict[str, Any]] = {
    "ranks: they are no whole pipelines": {"ranks": (_NOTHING,) * 3},
    "ranks: they are no whole pipelines of": {"ranks": ()},
    "no whole pipelines of the ranks in stage_ranks": {"stage_ranks": ()},
    r"ranks\.1\.actions: one is of no stage": {
        "ranks": (_NOTHING, RecordedRank(((2, "F", 0, 0, 1),), (), {}))
    },
    r"ranks\.0\.actions: .* or ends before it starts": {
        "ranks": (RecordedRank(((0, "F", 0, 2, 1),), (), {}), _NOTHING)
    },
    r"ranks\.1\.blocked: a wait ends before": {"ranks": (_NOTHING, RecordedRank((), (("tp", 2, 1),), {}))},
}


def test_files_whose_values_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2)
    write_metrics(tmp_path, 2)
    step = write_recorded_step(tmp_path, 2, 1)
    about = read_run(tmp_path).description
    assert about is not None
    last = PredictedRank(1, 1, 1, {})
    write_description(replace(about, memory=(last,)), tmp_path)
    write_step(replace(step, ranks=(RecordedRank(((1, "F", 0, 1, 1),), (("tp", 1, 1),), {}),) * 2), tmp_path)
    read_run(tmp_path)
    for reason, fields in STEP.items():
        write_step(replace(step, **fields), tmp_path)
        with pytest.raises(DataError, match=reason):
            read_run(tmp_path)
    write_step(step, tmp_path)
    for reason, fields in RUN.items():
        write_description(replace(about, **fields), tmp_path)
        with pytest.raises(DataError, match=reason):
            read_run(tmp_path)


def test_a_description_of_a_later_version_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path)
    write_metrics(tmp_path, 2)
    file = tmp_path / "run.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(
        DataError, match=r"run\.json has format 2, and this version of plait reads formats up"
    ):
        read_run(tmp_path)


def test_a_missing_run_folder_or_metrics_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist: give the folder of a run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl: give the folder"):
        read_run(tmp_path)
    write_metrics(tmp_path, 1)
    with pytest.raises(ConfigError, match="2 runs are given: name the page's file by --out"):
        write_report([tmp_path, tmp_path])
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([tmp_path], tmp_path / "none" / "page.html")
    (tmp_path / "report.html").symlink_to(tmp_path / "other.html")
    with pytest.raises(ConfigError, match=r"report\.html is a link, which others may have made: remove it"):
        write_report([tmp_path])
    with pytest.raises(
        ConfigError, match=r"metrics\.jsonl is a file of the run, which the page would replace"
    ):
        write_report([tmp_path], tmp_path / "metrics.jsonl")
    assert write_report([tmp_path], tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_any_number_of_runs_stand_side_by_side_in_colours_of_their_own(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(7)]
    for path in paths:
        write_metrics(path, 2)
    page = write_report(paths, tmp_path / "page.html").read_text()
    for number in range(7):
        colours = re.findall(rf"--series-{number}: (#[0-9a-f]{{6}});", page)
        assert len({*colours}) == 2, "light and dark"
    assert len({*re.findall(r"--series-\d: (#[0-9a-f]{6});", page)}) == 14


def test_evenly_spaced_samples_with_the_first_and_last_are_shown(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    for step in [*range(1, 101), 100]:
        write_event(tmp_path, "sample", step, f"<b>{step}</b>")
    page = samples_section(read_run(tmp_path), "", 0)
    shown = [int(step) for step in re.findall(r"&lt;b&gt;(\d+)&lt;/b&gt;", page)]
    assert (len(shown), shown[0], shown[-1]) == (24, 1, 100)
    assert "24 of 100 samples are shown." in page


def test_runs_of_one_name_are_named_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / part / "run" for part in "ab"]
    for path in paths:
        write_metrics(path, 1)
    assert [run.name for run in read_runs(paths)] == list(map(str, paths))
