"""A run with checkpoints and snapshots goes on from the newest of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.app.loop import checkpoint_callback
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.errors import CheckpointError
from plait.loop import Checkpoints, History
from plait.ranks.exchange_with_supervisor import (
    go_on_before,
    removed_at_end,
    restored_step,
    variables_of_supervisor,
)

PLAN = plait.Plan(pp=2)


class Numbers:
    size = 4

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(self.size, 4, generator=torch.Generator().manual_seed(step))[rows]
        return drawn, (drawn.sum(1) > 2).long()


class Ends(Callback):
    """Ends the run by an error after a step, on all ranks, once a checkpoint is written."""

    def __init__(self, step: int, checkpoints: Checkpoints) -> None:
        self._step, self._checkpoints = step, checkpoints

    def after_step(self, run: TrainingLoop) -> None:
        if run.done == self._step:
            self._checkpoints.finish()
            raise InterruptedError


def train(
    folder: Path, ends: int, *, steps: int = 8, rate: float = 0.1, **options: Any
) -> list[tuple[float, ...]]:
    """Return steps and losses of a run that ends after `ends` steps, and whether it went on from memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    history = History()
    options = {"every": 5, "keep_best": 2, "snapshots": snapshots_in(folder, 1)} | options
    checkpoints = Checkpoints(folder / "checkpoints", **options)
    callbacks = [history, checkpoints, Ends(ends, checkpoints)]
    with suppress(InterruptedError):
        plait.fit(
            model, PLAN, Numbers(), steps=steps, learning_rate=rate, validation=Numbers(), validate_every=3,
            validate_batches=1, callbacks=callbacks, optimizer=partial(torch.optim.SGD, momentum=0.9),
        )  # fmt: skip
    return [(row["step"], row["loss"]) for row in history.rows]


def snapshots_in(folder: Path, every: int) -> Callable[..., plait.Snapshots]:
    (memory := folder / "memory").mkdir(exist_ok=True)
    return partial(plait.Snapshots, every=every, name="run", folder=memory)


@pytest.fixture(scope="module")
def whole(thread_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert [step for step, _ in thread_ranks.run(train, folder, 9, ranks=2)[0]] == [*range(1, 9)]
    assert [*(folder / "memory").iterdir()] == []
    return folder


@pytest.fixture(scope="module")
def rows(thread_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    """Of a run that never ended, without snapshots."""
    found: list[tuple[float, ...]] = thread_ranks.run(
        partial(train, snapshots=None), tmp_path_factory.mktemp("rows"), 9, ranks=2
    )[0]
    return found


def test_a_run_goes_on_from_memory_and_reads_no_checkpoint(
    thread_ranks: Any, whole: Path, rows: list[tuple[float, ...]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It has the losses, and keeps the best checkpoints, of the run that never ended."""
    thread_ranks.run(train, tmp_path, 7, ranks=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_callback, "load_checkpoint", None)
        again = thread_ranks.run(train, tmp_path, 9, ranks=2)
    assert again == [rows[7:]] * 2
    assert f"Resumed from memory, {tmp_path / 'memory'}/plait-" in (told := capsys.readouterr().out)
    assert ", after step 7." in told
    assert [*(tmp_path / "memory").iterdir()] == []
    best = "checkpoints/best.json"
    assert (tmp_path / best).read_text() == (whole / best).read_text()


def test_the_newest_of_memory_and_disk_counts(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 5; where it is damaged, the snapshot of step 4."""
    seldom = partial(train, keep_best=False, snapshots=snapshots_in(tmp_path, 4))
    thread_ranks.run(seldom, tmp_path, 6, ranks=2)
    assert thread_ranks.run(seldom, tmp_path, 7, ranks=2) == [rows[5:7]] * 2
    (file,) = tmp_path.glob("checkpoints/step-00000005/rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert thread_ranks.run(seldom, tmp_path, 6, ranks=2) == [rows[4:6]] * 2
    told = capsys.readouterr().out
    assert "Resumed from" in told.partition("WARNING")[0]
    assert "after step 4." in told


def test_a_run_goes_on_from_the_last_step_without_wrong_bits(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of snapshots and checkpoints; the snapshot with wrong bits is gone, also for the next failure."""
    train_on = partial(train, keep_best=False)
    for name, value in variables_of_supervisor(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    thread_ranks.run(train_on, tmp_path, 7, ranks=2)
    go_on_before(str(tmp_path), 6)
    assert thread_ranks.run(train_on, tmp_path, 7, ranks=2) == [rows[6:7]] * 2
    assert restored_step(str(tmp_path)) == 6
    go_on_before(str(tmp_path), 5)
    assert thread_ranks.run(train_on, tmp_path, 9, ranks=2) == [rows[5:]] * 2
    assert restored_step(str(tmp_path)) == 5
    kept = [*(tmp_path / "memory").iterdir()]  # a rank may still fail, although this one has ended
    assert [*removed_at_end(str(tmp_path))] == kept != []


def test_a_checkpoint_with_wrong_bits_is_not_loaded_after_the_next_failure_either(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on = partial(train, every=2, keep_best=False, snapshots=None)
    for name, value in variables_of_supervisor(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    thread_ranks.run(train_on, tmp_path, 7, ranks=2)
    go_on_before(str(tmp_path), 5)
    for _ in range(2):
        assert thread_ranks.run(train_on, tmp_path, 5, ranks=2) == [rows[4:5]] * 2
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006.wrong-bits-1"]


def test_after_a_new_beginning_later_snapshots_count_again(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was kept had wrong bits; what is kept afterwards has not."""
    train_on = partial(train, every=None, keep_best=False)
    for name, value in variables_of_supervisor(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    thread_ranks.run(train_on, tmp_path, 4, ranks=2)
    go_on_before(str(tmp_path), 0)
    assert thread_ranks.run(train_on, tmp_path, 3, ranks=2) == [rows[:3]] * 2
    assert thread_ranks.run(train_on, tmp_path, 9, ranks=2) == [rows[3:]] * 2


def test_restarted_ranks_without_snapshots_go_on_from_a_checkpoint_of_their_launch(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from one that an earlier run has left in the folder."""
    fresh = partial(train, resume="no", keep_best=False, snapshots=None)
    thread_ranks.run(fresh, tmp_path, 7, ranks=2)
    for name, value in variables_of_supervisor(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert thread_ranks.run(fresh, tmp_path, 3, ranks=2) == [rows[:3]] * 2
    assert thread_ranks.run(fresh, tmp_path, 7, ranks=2) == [rows[:7]] * 2
    assert thread_ranks.run(fresh, tmp_path, 9, ranks=2) == [rows[5:]] * 2


def test_a_run_that_starts_over_goes_on_only_where_its_ranks_were_restarted(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = partial(train, resume="no")
    thread_ranks.run(fresh, tmp_path, 7, ranks=2)
    monkeypatch.setattr("plait.checkpoint.snapshots.snapshots.process_of_agent", lambda: "7-7")
    assert thread_ranks.run(fresh, tmp_path, 2, ranks=2) == [rows[:2]] * 2
    assert thread_ranks.run(fresh, tmp_path, 3, ranks=2) == [rows[2:3]] * 2


def test_a_run_that_starts_over_leaves_no_snapshot_of_before(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is killed before its first snapshot would go on from that of the other run."""
    thread_ranks.run(partial(train, every=None, keep_best=False), tmp_path, 7, ranks=2)
    monkeypatch.setattr("plait.checkpoint.snapshots.snapshots.process_of_agent", lambda: "7-7")
    seldom = partial(train, every=None, keep_best=False, snapshots=snapshots_in(tmp_path, 3))
    thread_ranks.run(partial(seldom, resume="no"), tmp_path, 2, ranks=2)
    assert thread_ranks.run(seldom, tmp_path, 1, ranks=2) == [rows[:1]] * 2


def test_memory_that_is_short_stops_a_run_or_is_a_warning(
    thread_ranks: Any, rows: list[tuple[float, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a folder in shared memory: an error, or with `require_snapshots=False` a warning."""
    nowhere = partial(plait.Snapshots, name="run", folder=tmp_path / "missing")
    with pytest.raises(CheckpointError, match="there is no folder"):
        thread_ranks.run(partial(train, snapshots=nowhere), tmp_path, 9, ranks=2)
    options = {"snapshots": nowhere, "require_snapshots": False}
    assert thread_ranks.run(partial(train, **options), tmp_path, 9, ranks=2) == [rows] * 2
    assert (
        "WARNING: the run goes on without snapshots in memory: there is no folder" in capsys.readouterr().out
    )
