"""The candidate is saved and loaded: under its own plan and under another one, or it is said why not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from verification_cases import mlp, mlp_case, rows_and_classes

import plait
from parity.pairs import in_quick
from plait.checkpoint.loading import load_checkpoint
from plait.plan.plan import Plan
from plait.verification import resumed_run
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.resumed_run import _after_mistakes, another_plan
from plait.verification.step_location import StepPhase
from plait.verification.verify import build_report


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(), None),
        (Plan(pp=2), Plan(dp=2)),
        (Plan(tp=2, precision="bf16", master_precision="fp32"), "full"),
        (Plan(dp=2), Plan(pp=2)),
        (Plan(dp=2, linears="float8"), Plan(pp=2, linears="float8")),
        (Plan(dp=8), None),
        (Plan(cp=2, strategy="full"), "full"),
    ],
    ids=str,
)
def test_the_other_plan_has_as_many_ranks_and_the_same_precisions(plan: Plan, expected: Any) -> None:
    other = another_plan(plan, layers=4)
    if expected == "full":
        assert other is not None
        assert (other.dp, other.strategy, other.precision) == (plan.world, "full", plan.precision)
    else:
        assert other == expected


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(pp=2, microbatches=2), marks=pytest.mark.full),
        Plan(dp=2, microbatches=2, strategy="full"),
    ],
    ids=str,
)
def test_a_resumed_run_is_compared_after_loading_and_after_one_more_step(
    thread_ranks: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    case = mlp_case(steps=1, resumes=True)
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=2), plan, case.options)
    assert report, report
    assert report.tallies[StepPhase.LOAD].compared > 20
    assert report.tallies[StepPhase.OPTIMIZER].compared > 40
    assert not report.left_out
    assert not list(tmp_path.iterdir()), "the checkpoint stayed"


@pytest.mark.full
def test_a_resumed_run_prints_nothing_of_what_a_user_is_told_who_loads(
    thread_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another plan with other micro-batches, or other numbers, that would be said of the candidate."""
    plan = Plan(dp=2, linears="float8", microbatches=2)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    case = replace(mlp_case(steps=1, resumes=True), model=model)
    inputs = [(torch.randn(8, 16), torch.randint(3, (8,))) for _ in range(2)]
    thread_ranks.run(verify_rank, replace(case, batches=inputs), plan, ranks=2)
    assert capsys.readouterr().out == ""


def test_optimizer_state_that_no_checkpoint_holds_is_reported_as_left_out() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["history"] = object()
            return super().step(closure)

    report = plait.verify(
        mlp(),
        Plan(microbatches=2),
        *rows_and_classes(),
        optimizer=lambda groups: Odd(groups, lr=0.1),
        ranks_as="threads",
    )
    assert report
    assert "history" in report.left_out
    assert "left out" in str(report)


def test_nothing_is_written_where_the_disk_has_no_room() -> None:
    full = lambda folder: type("Usage", (), {"free": 10})()  # noqa: E731
    with patch.object(resumed_run.shutil, "disk_usage", full):
        report = plait.verify(mlp(), Plan(microbatches=2), *rows_and_classes(), ranks_as="threads")
    assert report
    assert "GB free" in report.left_out


@pytest.mark.parametrize(
    ("wrong", "names", "cause"),
    [
        pytest.param("parameter", {"0.weight"}, "", marks=pytest.mark.full),
        ("state", {f"0.weight/{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")}, "has no such state"),
    ],
)
def test_an_error_that_occurs_only_after_loading_under_another_plan_is_named(
    thread_ranks: Any, wrong: str, names: set[str], cause: str
) -> None:
    plan = Plan(dp=2, microbatches=2)

    def wrong_under_pp(engine: Any, optimizer: Any, path: Any, *more: Any) -> None:
        load_checkpoint(engine, optimizer, path, *more)
        weight = dict(engine.named_parameters()).get("0.weight")
        if engine.plan.pp == 2 and weight is not None and wrong == "parameter":
            weight.data.mul_(1 + 1e-6)
        elif engine.plan.pp == 2 and weight is not None:
            optimizer.state.pop(weight)

    case = mlp_case(steps=1, resumes=True)
    with patch.object(resumed_run, "load_checkpoint", wrong_under_pp):
        report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=2), plan, case.options)
    assert report.first is not None
    found = {
        (one.location.step, one.location.phase, one.location.name)
        for one in (report.first.difference, *report.others)
    }
    assert found == {(1, StepPhase.LOAD, name) for name in names}
    assert cause in report.first.cause


def test_exact_mode_does_not_resume_from_a_checkpoint() -> None:
    assert VerifyOptions(mode="exact", steps=1, resumes=True).resumed_steps == 0


def test_a_wrongly_loaded_tensor_is_matched_with_other_saved_tensors() -> None:
    def found(name: str) -> dict[str, float]:
        first = {"weight": torch.zeros(2), "bias": torch.ones(2)}
        loaded = {"weight": torch.zeros(2), "bias": torch.ones(2), "step": torch.tensor(3.0)}
        values = {"weight": torch.full((2,), 4.0), "bias": torch.full((2,), 5.0), "step": torch.tensor(6.0)}
        saved = [(one, value, None) for one, value in (values | {"lost": torch.tensor(7.0)}).items()]
        return {text: float(one.detach().sum()) for text, one in _after_mistakes(name, first, loaded, saved)}

    new = "it is what a new engine starts with: it was not loaded"
    assert found("weight") == {new: 0.0, "it is what was saved of bias": 10.0}
    assert found("bias") == {new: 2.0, "it is what was saved of weight": 8.0}
    assert found("step") == {"it is what was saved of lost": 7.0}
    assert found("lost") == {"the loaded optimizer has no such state": 0.0}


@pytest.mark.parametrize(
    ("field", "cause"),
    in_quick(
        [
            ("parameters", "it is what a new engine starts with"),
            *(("buffers", ""), ("passes", ""), ("state", "")),
        ],
        *(("buffers", ""), ("state", "")),
    ),
)
def test_a_tensor_that_was_not_loaded_is_named(field: str, cause: str) -> None:
    """A bit of a buffer, too; and nothing is compared with itself."""

    def forgetful(engine: Any, optimizer: Any, path: Any, *more: Any) -> None:
        before = {name: one.detach().clone() for name, one in engine.named_parameters()}
        buffers = {name: one.clone() for name, one in engine.named_buffers()}
        passes = engine.passes
        load_checkpoint(engine, optimizer, path, *more)
        with torch.no_grad():
            if field == "parameters":
                dict(engine.named_parameters())["0.weight"].copy_(before["0.weight"])
            for name, one in engine.named_buffers() if field == "buffers" else ():
                one.copy_(buffers[name])
        if field == "passes":
            engine.passes = passes
        if field == "state":
            optimizer.state.pop(next(iter(engine.parameters())))

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 8)
            self.register_buffer("seen", torch.tensor([True, False]))
            self.register_buffer("scale", torch.ones(1))

    model = nn.Sequential(Counting(), *list(mlp())[1:])
    case = replace(mlp_case(steps=1, resumes=True), model=model)
    with patch.object(resumed_run, "load_checkpoint", forgetful):
        report = build_report([verify_rank(case, Plan(microbatches=2))], Plan(microbatches=2), case.options)
    assert report.first is not None
    location = report.first.difference.location
    names = {
        "parameters": "0.weight",
        "buffers": "0.seen",
        "passes": "run state passes",
        "state": "0.weight/step",
    }
    assert (location.step, location.phase) == (1, StepPhase.LOAD)
    differing = {one.location.name for one in (report.first.difference, *report.others)}
    assert names[field] in differing
    assert cause in report.first.cause
    loaded = report.tallies[StepPhase.LOAD]
    assert loaded.compared == 6 + 3 * 6 + 2 + 1
    assert loaded.different == {"parameters": 1, "buffers": 2, "passes": 1, "state": 3}[field]
