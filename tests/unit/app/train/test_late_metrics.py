"""On a GPU the metrics of a step are read after the next one was submitted: here CPU ranks do so, too."""

import math
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_runs import make, rows, run

import plait
from plait.app.loop import straggler_callback
from plait.app.loop import training_loop as training
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.errors import NonFiniteError
from plait.ranks.launch.rank_pool import RankPool

TIMES = (
    *("step_seconds", "data_seconds", "tokens_per_second", "peak_memory_bytes", "cpu_utilization"),
    *("slowest_rank", "slowness"),
)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ranks read late; returns what rank 0 does: trains and reads."""
    done: list[str] = []
    train, finish = TrainingLoop.step, TrainingLoop.finish

    def trained(self: TrainingLoop, step: int) -> Any:
        if self.mesh.rank == 0:
            done.append(f"train {step + 1}")
        return train(self, step)

    def finished(self: TrainingLoop) -> None:
        if self._unread is not None and self.mesh.rank == 0:
            done.append(f"read {self._unread[0] + 1}")
        finish(self)

    monkeypatch.setattr(training, "is_accelerator", lambda device: True)
    monkeypatch.setattr(TrainingLoop, "step", trained)
    monkeypatch.setattr(TrainingLoop, "finish", finished)
    return done


def test_metrics_read_a_step_late_are_the_same(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    options: dict[str, Any] = {"pp": 2, "microbatches": 1, "steps": 6, "validate_every": 3}
    late = run(thread_ranks, make(tmp_path / "late", **options))
    seen = list(order)
    monkeypatch.setattr(training, "is_accelerator", lambda device: False)
    at_once = run(thread_ranks, make(tmp_path / "at_once", **options))
    first, second = (
        [{name: value for name, value in row.items() if name not in TIMES} for row in rows(tmp_path / folder)]
        for folder in ("late", "at_once")
    )
    assert first == second
    assert (late[0].loss, late[0].validation_loss) == (at_once[0].loss, at_once[0].validation_loss)
    expected = (
        "train 1, train 2, read 1, train 3, read 2, read 3, train 4, train 5, read 4, train 6, read 5, read 6"
    )
    assert seen == expected.split(", ")


def test_a_number_that_is_not_finite_is_told_with_its_own_step(
    thread_ranks: RankPool, tmp_path: Path, order: list[str]
) -> None:
    """Though the next step, whose numbers are all NaN, was run before."""
    config = make(tmp_path, pp=2, lr=1e25, clip=0, warmup=0)
    with pytest.raises(
        NonFiniteError, match=r"^step 2: the (loss|gradient norm) is (nan|inf) on rank 1, stage 1: "
    ):
        run(thread_ranks, config)
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert order[-2:] == ["train 3", "read 2"]


def test_a_signal_ends_the_run_after_the_next_step(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    received = nullcontext(lambda: signal.SIGTERM if "train 2" in order else 0)
    monkeypatch.setattr("plait.app.train.train_run.received_signal", lambda signals: received)
    results = run(thread_ranks, make(tmp_path, dp=2, steps=9))
    assert {(one.steps, one.stopped) for one in results} == {(3, signal.SIGTERM)}
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


class Poisoned(Callback):
    """Makes a gradient of the second rank NaN, once the ranks have reduced it."""

    def begin(self, run: TrainingLoop) -> None:
        compute = run.forward_backward

        def poisoned(step: int) -> Tensor:
            loss = compute(step)
            if run.mesh.rank == 1 and step == 1:
                next(iter(run.engine.parameters())).grad.fill_(math.nan)
            return loss

        run.forward_backward = poisoned  # type: ignore[method-assign]


def poisoned_run(precision: str) -> str:
    plan = plait.Plan(dp=2, precision=precision, microbatches=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    data = [(torch.ones(4), torch.tensor(1))] * 8
    loader = plait.Loader(data, batch=4)
    try:
        plait.fit(model, plan, loader, steps=4, callbacks=[Poisoned()], broadcast=True)
    except NonFiniteError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_norm_that_is_not_finite_on_one_replica_is_told_on_every_rank(
    thread_ranks: RankPool, precision: str
) -> None:
    """It was an error on that rank, for which others waited, and in fp16 none: the replicas went apart."""
    told = thread_ranks.run(poisoned_run, precision, ranks=2)
    expected = (
        "step 2: the gradient norm is not finite on rank 1, and is on rank 0, whose replica of the model"
    )
    assert all(one.startswith(expected) for one in told), told


def test_ranks_are_compared_a_step_late_with_numbers_for_which_no_host_waits(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    monkeypatch.setattr(straggler_callback, "is_accelerator", lambda device: True)
    run(thread_ranks, make(tmp_path, dp=2, steps=10))
    assert [row["step"] for row in rows(tmp_path) if "slowness" in row] == [5, 9]
