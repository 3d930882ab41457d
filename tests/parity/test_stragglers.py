"""A slow rank is named, stages are cut anew, and the run computes what the undisturbed one does.

Ranks are slow by a clock of their own (`slowed`): the same on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.checkpoints import CONTEXT, VOCAB
from parity.pairs import in_quick
from parity.slowed import Slowed
from plait.app.loop.work_division import WorkDivision, work_of
from plait.errors import DataError
from plait.loop import Callback, Checkpoints, History, Stragglers, TrainingLoop
from plait.models.layers.layer_sequence import layer_costs, sequence_of
from plait.plan.plan import Plan

SLOW_FROM = 2
"""The step from which a rank is at half speed."""


@dataclass(frozen=True)
class Trained:
    """What a rank knows of a run."""

    lines: list[str]
    told_after: list[int]
    """The number of steps after which each line was told."""
    losses: list[float]
    norms: list[float]
    seconds: list[float]
    """For how long it computed in each step."""
    work: WorkDivision
    """How the last step was divided."""
    named: list[tuple[int, int, float]]
    """Steps of comparisons, slowest rank, slowness."""
    values: dict[str, Tensor]


class Tokens:
    def __init__(self, size: int) -> None:
        self.size = size

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (self.size, CONTEXT + 1), generator=drawn)[rows]
        return tokens[:, :-1], tokens[:, 1:]


class Told(Callback):
    """Keeps the lines of a run on each rank, of which each has the same, and how its work is divided."""

    work: WorkDivision

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.after: list[int] = []

    def begin(self, run: TrainingLoop) -> None:
        def tell(line: str) -> None:
            self.lines.append(line)
            self.after.append(run.done)

        run.tell = tell

    def before_step(self, run: TrainingLoop) -> None:
        self.work = work_of(run)


class Fails(Callback):
    """Ends a run on all ranks."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: TrainingLoop) -> None:
        if run.done == self._step:
            raise DataError("a failure")


@dataclass(frozen=True)
class Training:
    """A run, in which rank `slow` is at half speed until step `ends`."""

    plan: Plan
    slow: int | None
    steps: int = 15
    ends: int = 10**6
    rebalance: bool = True
    folder: Path | None = None
    in_memory: bool = False
    """Whether snapshots are taken every second step, and no checkpoints."""
    fails_after: int = 0
    waits: bool = False
    """Whether the slow rank only waits for a core for as long as it computes."""
    every: int = 3
    layers: int = 6
    rows: int = 8
    """Of a batch."""

    def factor(self, rank: int, step: int) -> float:
        return 2.0 if rank == self.slow and SLOW_FROM <= step < self.ends else 1.0


def model(layers: int) -> nn.Sequential:
    return plait.models.gpt2(layers=layers, hidden=16, heads=2, vocab=VOCAB, context=CONTEXT)


def train(training: Training) -> Trained:
    folder = training.folder
    told, history = Told(), History()
    slowed = Slowed(training.factor, waits=training.waits)
    checkpoints: list[Callback] = [] if folder is None else [Checkpoints(folder)]
    if folder is not None and training.in_memory:
        snapshots = partial(plait.Snapshots, every=2, name="stragglers", folder=folder)
        checkpoints = [Checkpoints(folder, every=None, snapshots=snapshots), Fails(training.fails_after)]
    result = plait.fit(
        *(model(training.layers), training.plan, Tokens(training.rows)),
        steps=training.steps,
        learning_rate=1e-2,
        clip=0.5,
        callbacks=[
            told,
            Stragglers(every=training.every, rebalance=training.rebalance),
            slowed,
            history,
            *checkpoints,
        ],
    )
    values = result.engine.state_dict(everywhere=True)
    named = [
        (int(row["step"]), int(row["slowest_rank"]), row["slowness"])
        for row in history.rows
        if "slowness" in row
    ]
    losses, norms = ([row[name] for row in history.rows] for name in ("loss", "grad_norm"))
    return Trained(told.lines, told.after, losses, norms, slowed.seconds, told.work, named, values)


def trained(thread_ranks: Any, training: Training) -> list[Trained]:
    """What each rank knows of a run on ranks that are threads."""
    found: list[Trained] = thread_ranks.run(train, training, ranks=training.plan.world)
    return found


def differences(one: Trained, other: Trained) -> float:
    """The largest difference of losses, norms and parameters of two runs."""
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    values = [float((value - other.values[name]).abs().max()) for name, value in one.values.items()]
    return max([*(abs(first - second) for first, second in pairs), *values])


def makespan(work: WorkDivision, factor: float) -> float:
    """Of a step of `pipeline`, in which rank 1 takes `factor` times as long for a layer."""
    costs = layer_costs(sequence_of(model(6)).layers)
    starts = [sum(work.cut[:stage]) for stage in range(len(work.cut))]
    stages = [
        sum(costs[start : start + count]) * (factor if stage == 1 else 1)
        for stage, (start, count) in enumerate(zip(starts, work.cut, strict=True))
    ]
    return plait.simulate(work.order.split_backward, plait.Costs(F=stages, I=stages, W=stages)).makespan


PLANS = {
    "pipeline": Plan(pp=3, microbatches=8, precision="fp64"),
    "replicas": Plan(pp=2, dp=2, microbatches=4, precision="fp64", strategy="full"),
    "two chunks": Plan(pp=2, microbatches=4, schedule="zb-v", precision="fp64"),
    "tensors cut": Plan(pp=2, tp=2, microbatches=4, precision="fp64"),
    "rows": Plan(dp=2, microbatches=2, precision="fp64", strategy="gradients"),
    "rows of pipelines": Plan(pp=2, dp=2, microbatches=2, precision="fp64", strategy="full"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", in_quick(PLANS, "pipeline", "rows"))
def test_work_moves_from_a_rank_at_half_speed_and_the_run_computes_the_same(
    thread_ranks: Any, name: str
) -> None:
    plan, slow, rows = PLANS[name], 1, 16 if "rows" in name else 8
    training = Training(plan, slow, rows=rows, steps=12)
    if name == "rows":  # the layers do not matter, and further comparisons are to find it as slow
        training = replace(training, steps=21, layers=2)
    runs = trained(thread_ranks, training)
    first, lines = runs[0], runs[0].lines
    assert all(run.lines == lines for run in runs)
    assert lines[0].startswith(f"WARNING: rank {slow} (host ")
    assert " computes 2 times as long as " in lines[0]
    assert lines[1].startswith("Rebalanced after step ")
    step = int(lines[1].removeprefix("Rebalanced after step ").split(":")[0])
    assert step <= SLOW_FROM + 20
    assert len(lines) == 2  # with fewer rows it is still as slow

    undisturbed = trained(thread_ranks, replace(training, slow=None))[0]
    assert not undisturbed.lines
    assert undisturbed.work != first.work
    assert differences(first, undisturbed) <= 1e-12

    loads = [max(run.seconds[at] for run in runs) for at in (0, step - 1, -1)]
    assert loads[1] == pytest.approx(2 * runs[slow].seconds[0])
    assert loads[2] < loads[1]
    if name == "pipeline":  # of few layers most of the loss
        healthy, before, after = (
            makespan(work, factor)
            for work, factor in ((undisturbed.work, 1), (undisturbed.work, 2), (first.work, 2))
        )
        assert before - after >= 0.6 * (before - healthy)
        assert first.work.order != undisturbed.work.order
    if name == "rows":  # in micro-batches of 5 and 6 rows, and of 2 and 3
        assert first.work.rows == (11, 5)


@pytest.mark.parametrize("source", in_quick(["a file", "a file of rows", "memory"], "a file of rows"))
def test_a_resumed_run_goes_on_with_the_work_of_before_and_has_the_same_bits(
    thread_ranks: Any, tmp_path: Path, source: str
) -> None:
    """From a checkpoint of another run, or a snapshot of a run that failed, taken after work had moved."""
    axis = {"dp": 2} if source == "a file of rows" else {"pp": 2}
    training = Training(Plan(**axis, microbatches=2, precision="fp64"), 1, steps=15, layers=3, rows=16)
    whole = trained(thread_ranks, training)[0]
    if source == "memory":
        with pytest.raises(DataError):
            trained(thread_ranks, replace(training, fails_after=12, folder=tmp_path, in_memory=True))
    else:
        trained(thread_ranks, replace(training, steps=12, folder=tmp_path))
    resumed = trained(thread_ranks, replace(training, folder=tmp_path, in_memory=source == "memory"))[0]
    assert any(line.startswith("Rebalanced") for line in whole.lines)
    assert resumed.lines == [line for line in resumed.lines if line.startswith("Resumed from ")]
    assert resumed.work == whole.work
    assert resumed.losses == whole.losses[12:]
    assert all(torch.equal(value, resumed.values[name]) for name, value in whole.values.items())


@pytest.mark.full
def test_stages_are_cut_back_when_a_rank_is_no_longer_slow(thread_ranks: Any) -> None:
    plan = Plan(pp=3, microbatches=8, precision="fp64")
    run = trained(thread_ranks, Training(plan, 2, steps=40, ends=16))[0]
    cuts = [line for line in run.lines if line.startswith("Rebalanced")]
    assert len(cuts) == 2
    healthy = trained(thread_ranks, Training(plan, None, steps=1))
    again = trained(thread_ranks, Training(plan, 2, steps=40, ends=16))
    assert max(one.seconds[-1] for one in again) <= 1.1 * max(one.seconds[0] for one in healthy)


def test_what_cannot_be_won_back_is_said(thread_ranks: Any) -> None:
    plan = Plan(dp=2, microbatches=4, precision="fp64")
    run = trained(thread_ranks, Training(plan, 1, layers=1))[0]
    assert "rank 1 (host " in run.lines[0]
    assert "times as long as rank 0 with the same work (F 2, B 2" in run.lines[0]
    assert run.lines[1:] == [
        "No other division of the work can win that back: all ranks have the same layers, and each replica "
        "has one row for each of its 4 micro-batches."
    ]


@pytest.mark.full
def test_without_rebalance_the_gain_is_said_and_nothing_moves(thread_ranks: Any) -> None:
    plan = Plan(pp=3, microbatches=8, precision="fp64")
    run = trained(thread_ranks, Training(plan, 0, rebalance=False))[0]
    undisturbed = trained(thread_ranks, Training(plan, None, rebalance=False))[0]
    assert run.work == undisturbed.work
    assert run.lines[1].startswith("With stages of ")
    assert run.lines[1].endswith("by simulation: rebalance moves them.")


def test_a_rank_that_only_waits_for_cores_is_named_after_twenty_comparisons(thread_ranks: Any) -> None:
    plan = Plan(dp=2, microbatches=2, precision="fp64")
    run = trained(thread_ranks, Training(plan, 1, steps=24, layers=1, waits=True, every=1))[0]
    assert "rank 1 (host " in run.lines[0]
    assert " waits for cores of its host, which others use, and takes 2 times as long as " in run.lines[0]
    assert "rank 0 with the same work, since" in run.lines[0]  # no ratios of its own times
    assert f"since about step {SLOW_FROM};" in run.lines[0]
    assert len(run.lines) == 2
    assert run.told_after[0] > 20
