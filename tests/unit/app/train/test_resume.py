"""A run that stops and goes on is the run that never stopped, whatever happens to its checkpoints."""

from __future__ import annotations

import errno
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.app.cli.main import main
from plait.app.config.config import Config
from plait.app.loop import checkpoint_callback as checkpoints
from plait.app.train.run_checkpoints import _require_same_fields, run_checkpoints
from plait.app.train.train_run import TrainingResult, train
from plait.checkpoint.loading import Loaded
from plait.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RankError
from plait.ranks.launch.rank_pool import RankPool


def make(folder: Path, *, parallel: dict[str, Any] | None = None, **settings: Any) -> Config:
    """Six steps of a model of one block."""
    run = {
        name: settings.pop(name)
        for name in (
            "save_every",
            "keep_last",
            "keep_every",
            "keep_best",
            "resume",
            "snapshot_every",
            "snapshot_folder",
        )
        if name in settings
    }
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
            "data": {"source": settings.pop("source", "random")},
            "train": {"steps": 6, "batch": 4, "microbatches": 2, "validate_batches": 1, "warmup": 2}
            | settings,
            "parallel": parallel or {},
            "run": {"dir": folder, "tensorboard": False} | run,
        }
    )


def run(pool: RankPool, config: Config) -> TrainingResult:
    return pool.run(train, config, ranks=config.plan().world)[0]


def numbers(folder: Path) -> list[tuple[float, float, float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def kept(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "checkpoints").iterdir())


def copied(folder: Path, steps: int, to: Path) -> Path:
    """As if the run had been killed after `steps` steps and one more."""
    to.mkdir()
    shutil.copytree(folder / "checkpoints" / f"step-{steps:08d}", to / "checkpoints" / f"step-{steps:08d}")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(lines[: steps + 1]) + '{"step": ')
    table = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (to / "metrics.csv").write_text("".join(table[: steps + 2]))
    return to


@pytest.fixture(scope="module")
def whole(thread_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stopped, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("whole")
    report = run(thread_ranks, make(folder, save_every=1, keep_last=0, parallel={"pp": 2}))
    assert (report.steps, report.stopped, report.saved) == (6, 0, True)
    return folder


def test_a_resumed_run_continues_with_the_same_bits(
    thread_ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    folder = copied(whole, 3, tmp_path / "run")
    run(thread_ranks, make(folder, resume="auto", parallel={"pp": 2}))
    assert numbers(folder) == numbers(whole)
    assert [line.partition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()] == [
        "step",
        *"123456",
    ]
    assert kept(folder) == ["step-00000003", "step-00000006"]
    assert run(thread_ranks, make(folder, resume="auto", parallel={"pp": 2})).steps == 6, (
        "nothing is left to do"
    )


def test_plait_train_goes_on_from_memory_with_the_same_bits(
    thread_ranks: RankPool, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after five steps by an error; there is a snapshot of the fourth, and no checkpoint."""
    (memory := tmp_path / "memory").mkdir()
    settings = {"parallel": {"pp": 2}, "snapshot_every": 2, "snapshot_folder": memory}

    def fail(samples: object, run: Any) -> None:
        if run.done == 5:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr("plait.app.train.train_run.Samples.after_step", fail)
        with pytest.raises(RankError):
            run(thread_ranks, make(tmp_path / "run", **settings))
    assert len([*memory.glob("*/*/*.json")]) == 4
    run(thread_ranks, make(tmp_path / "run", resume="auto", **settings))
    assert numbers(tmp_path / "run") == numbers(whole)
    assert [*memory.iterdir()] == []


@pytest.mark.full
def test_a_run_resumed_in_another_layout_has_the_losses_of_the_whole_run(
    thread_ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    path = whole / "checkpoints" / "step-00000003"
    parallel = {"tp": 2, "dp": 2, "strategy": "full"}
    run(thread_ranks, make(tmp_path, resume=str(path), parallel=parallel, microbatches=1))
    for row, other in zip(numbers(tmp_path), numbers(whole)[3:], strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    assert kept(tmp_path) == ["step-00000006"]


@pytest.mark.full
def test_a_run_resumed_in_several_cp_layouts_has_the_losses_of_the_whole_run(
    thread_ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    """After three steps on ranks of `pp` one on ranks of `cp`, one on ranks of `tp`, one on more of `cp`."""
    layouts: list[dict[str, Any]] = [
        {"cp": 2, "strategy": "optimizer"},
        {"tp": 2},
        {"cp": 4, "strategy": "full", "context_layout": "striped"},
    ]
    for number, parallel in enumerate(layouts):
        source = whole / "checkpoints" / "step-00000003"
        if number:
            source = tmp_path / str(number - 1) / "checkpoints" / f"step-{3 + number:08d}"
        made = make(tmp_path / str(number), resume=str(source), parallel=parallel, save_every=1, keep_last=0)
        run(thread_ranks, made)
        for row, other in zip(numbers(tmp_path / str(number)), numbers(whole)[3 + number :], strict=True):
            assert row == pytest.approx(other, rel=1e-5)


def test_a_damaged_checkpoint_is_reported_and_an_older_one_resumed(
    thread_ranks: RankPool, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(whole, 3, tmp_path / "run")
    for step in (4, 5, 6):
        name = f"step-0000000{step}"
        shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)
    file = folder / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    (folder / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    manifest = folder / "checkpoints" / "step-00000006" / "manifest.json"
    text = bytearray(manifest.read_bytes())
    text[100] ^= 0x80  # no UTF-8
    manifest.write_bytes(text)
    report = train(make(folder, resume="auto", keep_last=1))
    assert [row[0] for row in numbers(folder)] == [1, 2, 3, 4, 5, 6]
    told = capsys.readouterr().out.replace("\n", "")
    for damage in (
        "step-00000006 is damaged: manifest.json is not what was written: load ",
        "step-00000005 is damaged: it has no manifest.json: load ",
        "step-00000004 is damaged: rank-00001.safetensors has ",
    ):
        assert damage.replace(" ", "") in told.replace(" ", "")
    assert "step-00000003, after step 3." in told
    assert report.saved
    assert kept(folder) == [
        "step-00000004.aside-1",
        "step-00000005.damaged-1",
        "step-00000006",
        "step-00000006.aside-1",
    ]
    again = copied(whole, 3, tmp_path / "again")
    shutil.copytree(folder / "checkpoints" / "step-00000004.aside-1", again / "checkpoints" / "step-00000004")
    run(thread_ranks, make(again, resume="auto", keep_last=1, parallel={"pp": 2}))
    assert kept(again) == ["step-00000004.aside-1", "step-00000006"], (
        "a rank that read no damaged file passes it over too"
    )
    path = folder / "checkpoints" / "step-00000004.aside-1"
    with pytest.raises(CheckpointError, match=r"is damaged: rank-00001\.safetensors has"):
        run(thread_ranks, make(tmp_path / "other", resume=str(path), parallel={"pp": 2}))


def test_with_only_damaged_checkpoints_a_run_does_not_start_over(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, 3, tmp_path / "run")
    (folder / "checkpoints" / "step-00000003" / "manifest.json").write_text("{}")
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"are damaged \(step-00000003\): mend one, or start over"):
        train(make(folder, resume="auto"))
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_checkpoint_in_progress_when_the_loss_overflows_is_completed(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError, match="step 2"):
        run(thread_ranks, make(tmp_path, lr=1e38, warmup=0, save_every=1, parallel={"pp": 2}))
    assert kept(tmp_path) == ["step-00000001"]


def test_keep_last_and_keep_every_decide_which_checkpoints_are_kept(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    run(thread_ranks, make(tmp_path, save_every=1, keep_last=2, keep_every=3))
    assert kept(tmp_path) == ["step-00000003", "step-00000005", "step-00000006"]
    run(thread_ranks, make(tmp_path, steps=2))
    assert kept(tmp_path) == [
        "step-00000002",
        *(f"step-0000000{step}.aside-1" for step in (3, 5, 6)),
    ], "those of the run before are not this run's, and are not removed"
    run(thread_ranks, make(tmp_path / "none", save_every=None))
    assert not (tmp_path / "none" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("section", "field", "before", "now"),
    [("model", "heads", 4, 2), ("model", "top_k", None, 1), ("lora", "alpha", 16.0, 8.0)],
)
def test_a_run_whose_model_would_compute_otherwise_is_refused(
    tmp_path: Path, section: str, field: str, before: Any, now: Any
) -> None:
    config = make(tmp_path)
    experts = config.model.model_copy(update={"experts": 4, "kv_heads": 2})
    config = config.model_copy(update={"model": experts})
    part = config.model.lora if section == "lora" else config.model
    changed = part.model_copy(update={field: now})
    model = config.model.model_copy(update={"lora": changed}) if section == "lora" else changed
    state = json.loads(config.model_dump_json())
    (state["model"]["lora"] if section == "lora" else state["model"])[field] = before
    name = f"{'model.lora' if section == 'lora' else 'model'}.{field}"
    told = rf"{name} is {now}, and was {before or 2} when old was written: a resumed run needs the same model"
    with pytest.raises(ConfigError, match=told):
        _require_same_fields(config.model_copy(update={"model": model}), {"config": state}, Path("old"))
    same = json.loads(config.model_dump_json())
    same["model"] |= {"kv_heads": None, "top_k": 2}  # as many as heads, and the default
    _require_same_fields(config, {"config": same}, Path("old"))


def test_a_run_whose_data_would_be_another_is_refused(
    thread_ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    path = str(whole / "checkpoints" / "step-00000003")
    with pytest.raises(ConfigError, match=r"train\.seed is 1, and was 0 when .* was written: a resumed run"):
        run(thread_ranks, make(tmp_path, resume=path, seed=1))
    with pytest.raises(CheckpointError, match="nowhere is no folder: give the folder of a checkpoint"):
        run(thread_ranks, make(tmp_path, resume=str(tmp_path / "nowhere")))


def test_a_corpus_that_has_grown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    source = str(tmp_path / "text.txt")
    train(make(tmp_path / "run", steps=2, source=source))
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    with pytest.raises(DataError, match=r"rows = 94, and had 47 when .* start over with --run\.resume no"):
        train(make(tmp_path / "run", source=source, resume="auto"))


def test_plait_train_keeps_the_best_checkpoint_and_stops_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of random tokens nothing is learnt: with such a rate the loss only grows. It is an end like others."""
    settings = (
        "--data.source random --model.layers 1 --model.hidden 16 --model.heads 2 --model.context 16 "
        "--train.steps 20 --train.batch 4 --train.lr 0.1 --train.warmup 0 --train.validate_batches 1 "
        "--train.validate_every 2 --train.patience 2 --parallel.pp 2 --run.keep_best true --run.keep_last 1 "
        f"--run.ranks_as threads --run.tensorboard false --run.dir {tmp_path}"
    )
    assert main(["train", *settings.split()]) == 0
    assert kept(tmp_path) == ["best.json", "step-00000002", "step-00000006"]
    told = capsys.readouterr().out
    assert "The run ends after step 6: 2 validations had no lower loss than" in told
    assert f"that of step 2: {tmp_path}/checkpoints/best." in told.replace("\n", "")
    assert "Stopped" not in told
    best = str(tmp_path / "checkpoints" / "best")
    assert main(["checkpoint", "inspect", best]) == 0
    told = "".join(capsys.readouterr().out.split())  # a table of 80 columns breaks names, where they are long
    assert "step-00000002" in told
    assert main(["checkpoint", "export", best, str(tmp_path / "exported"), "--format", "huggingface"]) == 0


@pytest.mark.full
def test_training_continues_where_checkpoints_cannot_be_written(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    report = run(thread_ranks, make(tmp_path, save_every=2, parallel={"pp": 2}))
    assert (report.steps, report.saved) == (6, False)
    assert len(numbers(tmp_path)) == 6
    assert capsys.readouterr().out.count("WARNING: the checkpoint") == 3


def loaded_of(step: object, *asked: object) -> Loaded:
    return Loaded({"step": step}, {})


def test_a_checkpoint_with_an_invalid_step_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in [-5, 2.0, True, None, "3"]:
        monkeypatch.setattr(checkpoints, "load_checkpoint", partial(loaded_of, step))
        optimizer, mesh = SimpleNamespace(param_groups=[]), SimpleNamespace(rank=0)
        trainer: Any = SimpleNamespace(engine=None, optimizer=optimizer, mesh=mesh, tell=print)
        config = make(tmp_path, resume=str(tmp_path / "one"))
        run = run_checkpoints(config)
        with pytest.raises(CheckpointError, match="has no number of steps: give one of plait train"):
            run.resume(trainer)


def test_a_checkpoint_that_fails_in_the_background_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is known, and not again when it is waited for."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("plait.checkpoint.save_task.write_file", full)
    assert not train(make(tmp_path, save_every=3)).saved
    told = capsys.readouterr().out.replace("\n", " ")
    assert told.count("WARNING: the checkpoint") == told.count("No space left") == 2, "of steps 3 and 6"
