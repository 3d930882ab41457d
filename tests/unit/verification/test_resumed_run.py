"""The candidate is saved and loaded: under its own plan and under another one, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from verification_cases import mlp, mlp_case, rows_and_classes

import plait
from plait.plan import Plan
from plait.verification import resumed_run
from plait.verification.location import StepPhase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.report_from_ranks import build_report
from plait.verification.resumed_run import another_plan


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(), None),
        (Plan(pp=2), Plan(dp=2)),
        (Plan(tp=2, precision="bf16", master_precision="fp32"), "full"),
        (Plan(dp=2), Plan(pp=2)),
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
    "plan", [Plan(pp=2, microbatches=2), Plan(dp=2, microbatches=2, strategy="full")], ids=str
)
def test_it_is_compared_after_loading_and_after_one_more_step(thread_ranks: Any, plan: Plan) -> None:
    case = mlp_case(steps=1, resumes=True)
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=2), plan, case.options)
    assert report, report
    assert report.tallies[StepPhase.LOAD].compared > 20
    assert report.tallies[StepPhase.OPTIMIZER].compared > 40
    assert not report.left_out


def test_what_no_checkpoint_holds_is_said() -> None:
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


def test_mode_exact_does_not_go_on() -> None:
    assert VerifyOptions(mode="exact", steps=1, resumes=True).resumed_steps == 0
