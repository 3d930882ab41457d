"""The callback `WrongBits`: what a run that finds wrong bits keeps, and how one goes on without them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.app.loop.builtin_callbacks import WrongBits
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import BestCheckpoint, best_checkpoints, mark_best, withdraw
from plait.errors import CorruptionError
from plait.loop import Checkpoints, History
from plait.plan.plan import Plan

STEPS = 6


class Tokens:
    """Batches of numbers that depend on the step only."""

    size = 4

    def batch(self, step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(64, (self.size, 9), generator=torch.Generator().manual_seed(step))[rows]
        return tokens[:, :-1], tokens[:, 1:]


def small_gpt() -> torch.nn.Sequential:
    return plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=64, context=8)


class FlipAndReshard(Callback):
    """Changes a parameter unnoticed after the second step; reshards after a step, if the second: then."""

    def __init__(self, resharded: int) -> None:
        self._resharded = resharded

    def after_step(self, run: TrainingLoop) -> None:
        if run.done == 2:
            flip_a_bit(run)
        if run.done == self._resharded:
            run.reshard(Plan(microbatches=2, strategy="full"))


def flip_a_bit(run: TrainingLoop) -> None:
    parameter = next(iter(run.engine.parameters()))
    parameter.detach().numpy().view("uint8").reshape(-1)[3] ^= 1


@pytest.mark.parametrize("resharded", [1, 2])
def test_wrong_bits_are_found_in_the_memory_of_an_engine_that_replaces_another_or_is_replaced(
    resharded: int,
) -> None:
    with pytest.raises(
        CorruptionError, match="changed in memory by one bit, after the update of step"
    ) as found:
        plait.fit(small_gpt(), Plan(), Tokens(), steps=4, callbacks=[WrongBits(), FlipAndReshard(resharded)])
    assert found.value.last_good_step == 1
    assert found.value.ranks == (0,)


class WrongOnRequest(torch.optim.SGD):
    """Updates one parameter by too much, where it is told to: a device that computes wrongly."""

    elementwise = True
    wrong = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.wrong:
            self.param_groups[0]["params"][3].view(-1)[-1:].mul_(1.001)


class WrongUpdate(Callback):
    """Rank 1 computes the update of one step wrongly."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self, run: TrainingLoop) -> None:
        assert isinstance(run.optimizer, WrongOnRequest)
        run.optimizer.wrong = run.done + 1 == self._step and run.mesh.rank == 1


def rows_of_run(folder: Path, plan: Plan, disturbed: int, snapshots: bool) -> list[tuple[float, ...]]:
    """Return steps and losses of a run that saves after each step, until it ends or has wrong bits."""
    history, memory = History(), folder / "memory"
    memory.mkdir(exist_ok=True, parents=True)
    make = partial(plait.Snapshots, every=1, name="run", folder=memory) if snapshots else None
    checkpoints = Checkpoints(folder / "checkpoints", every=None if snapshots else 1, snapshots=make)
    callbacks = [history, WrongBits(), WrongUpdate(disturbed), checkpoints]
    with suppress(CorruptionError):
        plait.fit(
            small_gpt(), plan, Tokens(), steps=STEPS, optimizer=partial(WrongOnRequest, lr=0.1),
            learning_rate=0.1, callbacks=callbacks,
        )  # fmt: skip
    return [(row["step"], row["loss"]) for row in history.rows]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("snapshots", [False, True])
def test_what_was_kept_after_the_last_good_step_is_withdrawn_and_no_run_resumes_from_it(
    thread_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshots: bool
) -> None:
    """Only replicas reveal a wrong update, in the next step: by then its checkpoint is written."""
    plan = Plan(dp=2, precision="fp64")
    whole = thread_ranks.run(rows_of_run, tmp_path / "whole", plan, 0, snapshots, ranks=2)[0]
    first = thread_ranks.run(rows_of_run, tmp_path, plan, 4, snapshots, ranks=2)[0]
    assert first == whole[:4]
    told = capsys.readouterr().out
    if not snapshots:
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["step-00000003", "step-00000004.wrong-bits-1"]
        assert "may have wrong bits: they are now called step-00000004.wrong-bits-1." in told
    assert thread_ranks.run(rows_of_run, tmp_path, plan, 0, snapshots, ranks=2) == [whole[3:]] * 2


def test_withdrawn_checkpoints_are_no_longer_the_best_and_hidden_complete_ones_are_withdrawn_too(
    tmp_path: Path,
) -> None:
    for name in ("step-00000002", ".step-00000003.replaced", "step-00000004", "step-00000004.wrong-bits-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    kept = [BestCheckpoint(4, 0.5), BestCheckpoint(2, 0.6)]
    mark_best(tmp_path, kept, Disk())
    renamed = withdraw(tmp_path, {3, 4, 5}, Disk())
    assert {path.name for path in renamed} >= {"step-00000004.wrong-bits-2"}
    assert best_checkpoints(tmp_path) == kept[1:]
    assert (tmp_path / "step-00000002").is_dir()
    assert withdraw(tmp_path, {3, 4, 5}, Disk()) == []


class FlipOnce(Callback):
    """Flips a bit on rank 1 after a step, in the first generation of ranks only."""

    def __init__(self, folder: Path, step: int) -> None:
        self._marker, self._step = folder / "flipped", step

    def after_step(self, run: TrainingLoop) -> None:
        if run.done == self._step and run.mesh.rank == 1 and not self._marker.exists():
            self._marker.touch()
            flip_a_bit(run)


def run_with_a_flip(folder: Path, step: int) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor], int]:
    """Return steps and losses since the last failure, the parameters at the end, and this process's id."""
    history = History()
    folder.mkdir(exist_ok=True)
    with (folder / "processes").open("a") as file:
        file.write(f"{os.getpid()}\n")
    snapshots = partial(plait.Snapshots, every=1, name="run", folder=folder)
    ends: dict[str, torch.Tensor] = {}

    class End(Callback):
        def end(self, run: TrainingLoop, error: BaseException | None) -> None:
            if error is None:
                ends.update(run.engine.state_dict(everywhere=True))

    callbacks = [history, WrongBits(), FlipOnce(folder, step), End()]
    callbacks.append(Checkpoints(folder / "checkpoints", every=None, snapshots=snapshots))
    plait.fit(small_gpt(), Plan(dp=2, precision="fp64"), Tokens(), steps=STEPS, callbacks=callbacks)
    return [(row["step"], row["loss"]) for row in history.rows], ends, os.getpid()


def test_an_elastic_run_replaces_the_rank_whose_bit_flipped_and_has_the_bits_of_the_undisturbed_run(
    thread_ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = thread_ranks.run(run_with_a_flip, tmp_path / "whole", 0, ranks=2)
    found = plait.launch(
        run_with_a_flip, tmp_path / "flipped", 4,
        ranks=2, threads=1, device="cpu", timeout=30.0, elastic=True,
    )  # fmt: skip
    told = capfd.readouterr().err
    assert "plait: rank 1 failed: plait.errors.CorruptionError: rank 1 on host" in told
    first = (tmp_path / "flipped" / "processes").read_text().split()
    assert str(found[0][2]) in first[:2]
    assert str(found[1][2]) not in first[:2]
    for (rows, parameters, _), (every, expected, _) in zip(found, whole, strict=True):
        assert rows == every[3:]  # from step 3, the last that is known to be right
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], one) for name, one in expected.items())
