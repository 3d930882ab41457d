"""Early stop and the best checkpoint, in runs whose validation losses are given: also where they go on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.app.loop import training_loop as training
from plait.app.loop.meter import Meter
from plait.checkpoint.folders import resolve
from plait.errors import CheckpointError, ConfigError, DataError
from plait.loop import Callback, Checkpoints, EarlyStop, Validation
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

WEIGHTS = (5.0, 3.0, 4.0, 2.0, 3.0, 3.0, 1.0)
"""The model's only weight after each step; its square is the validation loss."""
ONE = Plan(precision="fp64")
PLANS = {"pp": Plan(pp=2, precision="fp64"), "dp": Plan(dp=2, strategy="full", precision="fp64")}


class Given:
    """Batches of ones, whose targets the single weight has after a step."""

    def __init__(self, targets: Sequence[float], rows: int = 2) -> None:
        self.targets, self.size = targets, rows

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        return ones[rows], self.targets[step] * ones[rows]


def run(
    plan: Plan,
    *callbacks: Callback,
    steps: int = len(WEIGHTS),
    every: int = 1,
    targets: Sequence[float] = WEIGHTS,
    validation: Given | None = None,
) -> Any:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()).double()
    nn.init.constant_(model[0].weight, 9.0)  # type: ignore[arg-type]
    return plait.fit(
        model,
        plan,
        Given(targets),
        steps=steps,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        learning_rate=0.5,
        weight_decay=0.0,
        validation=validation or Given([0.0]),
        validate_every=every,
        callbacks=callbacks,
    )


def stopping(plan: Plan, folder: Path, steps: int = 7, patience: int = 2) -> tuple[int, bool, Any]:
    kept = Checkpoints(folder, keep_last=1, keep_best=True)
    result = run(plan, EarlyStop(patience), kept, steps=steps)
    return result.steps, result.stopped, result.lowest and (result.lowest.step, result.lowest.loss)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_early_stop_ends_the_run_and_keeps_the_best_checkpoint(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    assert thread_ranks.run(stopping, PLANS["pp"], tmp_path, ranks=2) == [(6, True, (4, 4.0))] * 2
    assert names(tmp_path) == ["best.json", "step-00000004", "step-00000006"]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 4, "validation_loss": 4.0}
    engine = run(ONE, steps=1).engine
    plait.load(engine, None, tmp_path / "best")
    assert engine.state_dict()["0.weight"].item() == WEIGHTS[3]


def test_early_stop_with_late_numbers_as_on_a_gpu_ends_at_the_same_step(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(training, "is_accelerator", lambda device: True)
    assert thread_ranks.run(stopping, PLANS["dp"], tmp_path, ranks=2) == [(6, True, (4, 4.0))] * 2
    assert names(tmp_path) == ["best.json", "step-00000004", "step-00000006"]


def test_a_resumed_run_continues_counting_validations_for_early_stop(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another layout; once ended it does not go on by itself, but with more patience."""
    assert thread_ranks.run(stopping, PLANS["pp"], tmp_path, 5, ranks=2)[0] == (5, False, (4, 4.0))
    assert thread_ranks.run(stopping, PLANS["dp"], tmp_path, ranks=2)[0] == (6, True, (4, 4.0))
    assert capsys.readouterr().out.endswith(
        "The run ends after step 6: 2 validations had no lower loss than 4.000, that of step 4.\n"
        f"The lowest validation loss, 4.000, is that of step 4: {tmp_path}/best.\n"
    )
    assert stopping(ONE, tmp_path) == (6, True, (4, 4.0))
    assert stopping(ONE, tmp_path, patience=3) == (7, False, (7, 1.0))
    assert names(tmp_path) == ["best.json", "step-00000007"]


def test_with_keep_best_only_the_best_checkpoints_are_saved(tmp_path: Path) -> None:
    run(ONE, Checkpoints(tmp_path, every=None, keep_last=1, keep_best=True), steps=6)
    assert names(tmp_path) == ["best.json", "step-00000004"]


def test_keep_best_keeps_that_many_checkpoints_also_after_a_resumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are 25, 9, 16, 4, 9, 9, 1: of equal ones the earlier is kept."""

    def steps_of_marker() -> list[int]:
        read = json.loads((tmp_path / "best.json").read_text())
        return [one["step"] for one in (read, *read["others"])]

    run(ONE, Checkpoints(tmp_path, keep_last=1, keep_best=3), steps=5)
    assert steps_of_marker() == [4, 2, 5]
    assert "step 4: " in (told := capsys.readouterr().out)
    assert told.endswith("The next ones are kept, too: 9.000 of step 2, 9.000 of step 5.\n")
    run(ONE, Checkpoints(tmp_path, keep_last=1, keep_best=3), steps=6)
    assert steps_of_marker() == [4, 2, 5]
    assert names(tmp_path) == ["best.json", *(f"step-0000000{step}" for step in (2, 4, 5, 6))]
    run(ONE, Checkpoints(tmp_path, keep_last=1, keep_best=3), steps=7)
    assert steps_of_marker() == [7, 4, 2]
    run(ONE, Checkpoints(tmp_path, keep_last=0, keep_best=3, resume=tmp_path / "step-00000004"), steps=5)
    assert steps_of_marker() == [4, 2, 5], "as the checkpoint of step 4 knows"
    run(ONE, Checkpoints(tmp_path, keep_last=0, keep_best=3, resume="no"), steps=7, every=3)
    assert steps_of_marker() == [7, 6, 3], "of the steps that were validated"


def test_a_checkpoint_is_saved_after_the_given_minutes(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of rank 0: the other one would save in each step."""
    readings = {0: itertools.count(0.0, 25.0), 1: itertools.count(0.0, 900.0)}

    def of_rank() -> None:
        run(PLANS["pp"], Checkpoints(tmp_path, every=0, keep_last=0, minutes=1))

    def elapsed(self: Meter) -> float:
        return next(readings[self._mesh.rank])

    monkeypatch.setattr(Meter, "elapsed", elapsed)
    thread_ranks.run(of_rank, ranks=2)
    assert names(tmp_path) == ["step-00000004", "step-00000007"]


def test_a_checkpoint_of_some_minutes_is_saved_after_its_step_s_numbers_are_read(tmp_path: Path) -> None:
    """On a GPU they are read a step later otherwise, and a loss that is not finite would be saved."""
    read: list[str] = []
    engine = SimpleNamespace(compare_memory=lambda: read.append("compared"))
    loop: Any = SimpleNamespace(
        numbers=SimpleNamespace(clock=100.0), done=3, row={}, is_last=False, engine=engine
    )
    loop.finish = lambda: read.append("read")
    callback = Checkpoints(tmp_path, every=0, minutes=1)
    with patch.object(callback, "_try", lambda save: read.append("saved")):
        callback._save_if_due(loop)
        callback._save_if_due(loop)
    assert read[:2] == ["read", "compared"]
    assert read[-1] == "saved"


def test_a_missing_best_marker_is_written_on_resumption(tmp_path: Path) -> None:
    """The run was killed between a checkpoint and its marker."""
    run(ONE, Checkpoints(tmp_path, keep_last=0, keep_best=True), steps=4)
    (tmp_path / "best.json").write_text('{"step": 2, "validation_loss": 9.0}')
    run(ONE, Checkpoints(tmp_path, keep_last=0, keep_best=True), steps=5)
    assert resolve(tmp_path / "best").name == "step-00000004"


def test_the_best_of_another_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    run(ONE, Checkpoints(tmp_path, keep_best=True))
    assert resolve(tmp_path / "best").name == "step-00000007"
    run(ONE, Checkpoints(tmp_path, every=1, keep_last=0, resume="no"), steps=3)
    with pytest.raises(CheckpointError, match=r"records no best checkpoint in best\.json: give the folder"):
        resolve(tmp_path / "best")
    run(ONE, Checkpoints(tmp_path, keep_best=True), steps=3)
    assert resolve(tmp_path / "best").name == "step-00000002", "as the checkpoint of step 3 knows"


def test_losses_of_other_validation_data_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ONE, Checkpoints(tmp_path), steps=4)
    result = run(ONE, Checkpoints(tmp_path), steps=6, validation=Given([0.0], rows=4))
    assert (result.lowest.step, result.lowest.loss) == (5, 9.0)
    assert "the lowest validation loss is searched anew" in capsys.readouterr().out


@pytest.mark.parametrize("callback", [EarlyStop(1), Checkpoints("nowhere", keep_best=True)], ids=type)
@pytest.mark.parametrize("before", [[], [Validation(Given([0.0]), name="other")]], ids=["none", "at the end"])
def test_early_stop_and_keep_best_without_validations_are_refused(
    callback: Callback, before: list[Callback]
) -> None:
    with pytest.raises(DataError, match=f"{type(callback).__name__} needs validation losses, but nothing"):
        run(ONE, *before, callback, every=0)


def test_early_stop_and_validation_refuse_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match="a metric is called loss, as the validation loss is: give it"):
        Validation(None, metrics={"loss": torch.sub})
    with pytest.raises(ConfigError, match="EarlyStop's patience is 0: give a whole number of at least 1"):
        EarlyStop(0)


def test_each_validation_has_a_lowest_loss_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a run goes on with the validations in another order; the first one counts unless named."""

    def both(*names: str, steps: int, watch: str | None = None) -> Any:
        data = {"low": Given([0.0]), "high": Given([9.0])}
        callbacks = [Validation(data[name], every=1, name=name) for name in names]
        kept = Checkpoints(tmp_path, keep_best=True, watch=watch)
        model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
        options = {
            "loss": nn.MSELoss(),
            "optimizer": torch.optim.SGD,
            "learning_rate": 0.5,
            "weight_decay": 0.0,
        }
        plait.fit(model, ONE, Given(WEIGHTS), steps=steps, callbacks=[*callbacks, kept], **options)
        return {one.name: one.lowest and (one.lowest.step, one.lowest.loss) for one in callbacks}

    assert both("low", "high", steps=3) == {"low": (2, 9.0), "high": (1, 16.0)}
    assert (
        "Checkpoints compares validation_low_loss; watch='high' compares another." in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 2
    assert both("high", "low", steps=4, watch="high") == {"low": (4, 4.0), "high": (1, 16.0)}
    both("low", steps=5)
    told = capsys.readouterr().out
    assert "holds the state of Validation high, and the run has no such callback: it is left out" in told
    with pytest.raises(
        DataError, match="Checkpoints watches the validation 'lo', but those before it are 'low'"
    ):
        both("low", steps=6, watch="lo")
    with pytest.raises(ConfigError, match="two validations write validation_low_loss into the row"):
        both("low", "low", steps=6)


class Masked:
    """Two batches of ones, of which only some targets count."""

    size = 2

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        targets = torch.full((2, 3), -100)
        targets.view(-1)[: self.counts[step]] = step
        return torch.ones(2, 3, 1)[rows], targets[rows]


@pytest.mark.parametrize(("training", "validation"), [(0, 1), (6, 0)])
def test_where_no_target_counts_nothing_is_blamed_on_the_learning_rate(
    training: int, validation: int
) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Identity())
    with pytest.raises(DataError, match="-100"):
        plait.fit(model, ONE, Masked(training), steps=1, validation=Masked(validation), validate_every=1)
