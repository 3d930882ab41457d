"""The table of many plans: what it says of all of them, and of each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from verification_cases import mlp_case, verify_here

from plait.plan.plan import Plan
from plait.verification.findings import Findings, Tally
from plait.verification.rank_verification import RankOutcome
from plait.verification.reference.recording import Tolerance
from plait.verification.report import VerificationReport
from plait.verification.step_location import Location, StepPhase
from plait.verification.sweep import RefusedPlan, Sweep
from plait.verification.verify import build_report

ONE, TWO = Plan(dp=2, microbatches=2), Plan(pp=2, microbatches=4, schedule="zb-h1")
NO = RefusedPlan("7 heads do not divide by tp = 2: change one of them.")


@pytest.fixture(scope="module")
def equal() -> VerificationReport:
    return verify_here(mlp_case(steps=1))


@pytest.fixture(scope="module")
def different(equal: VerificationReport) -> VerificationReport:
    """As where the loss of a micro-batch is another."""

    findings = Findings(4)
    findings.compare(Location(0, StepPhase.FORWARD, 2, 1), torch.ones(2), torch.zeros(2), Tolerance(1.0, 0.0))
    coordinate = {"pp": 0, "replicate": 0, "shard": 0, "cp": 0, "tp": 0}
    return build_report(
        [RankOutcome(0, coordinate, equal.paths, findings, 0.1, 0.5)], TWO, mlp_case().options
    )


def used(report: VerificationReport, share: float) -> VerificationReport:
    return replace(report, tallies={StepPhase.FORWARD: Tally(10, 0, share, share * 1e-15)})


def test_a_sweep_of_equal_plans_is_equal(equal: VerificationReport) -> None:
    survey = Sweep(2, ((ONE, used(equal, 0.1)), (TWO, used(equal, 0.25))))
    assert survey
    assert survey.headline() == ("EQUAL to one rank: all 2 plans on 2 ranks, 25% of what rounding explains.")
    first, second = str(survey).splitlines()[2:]
    assert first.startswith("  pp 1 · dp 2 · tp 1  1f1b         m 2   equal  1.0e-16   10%")
    assert second.startswith("  pp 2 · dp 1 · tp 1  zb-h1        m 4   equal  2.5e-16   25%")


def test_plans_that_are_refused_do_not_make_a_sweep_unequal(equal: VerificationReport) -> None:
    survey = Sweep(2, ((ONE, used(equal, 0.1)), (TWO, NO)))
    assert survey
    assert survey.reports == (used(equal, 0.1),)
    assert survey.headline().endswith("what rounding explains (1 more are not possible for this model).")
    assert str(survey).splitlines()[3].endswith(f"tp 1  zb-h1        m 4   not possible: {NO.reason}")


def test_each_row_names_its_schedule_and_what_is_recomputed(equal: VerificationReport) -> None:
    refused = replace(TWO, recompute="full"), replace(TWO, schedule="v-min", recompute=("none", "full"))
    rows = ((replace(ONE, recompute="selective"), used(equal, 0.1)), *((plan, NO) for plan in refused))
    lines = str(Sweep(2, rows)).splitlines()[2:]
    assert [
        line.split(f" {word}")[0].rstrip() for line, word in zip(lines, ("equal", "not", "not"), strict=True)
    ] == [
        "  pp 1 · dp 2 · tp 1 · recompute selective  1f1b         m 2",
        "  pp 2 · dp 1 · tp 1 · recompute full       zb-h1        m 4",
        "  pp 2 · dp 1 · tp 1 · recompute by layer   v-min        m 4",
    ]


def test_a_sweep_with_a_different_plan_is_not_equal(
    equal: VerificationReport, different: VerificationReport
) -> None:
    survey = Sweep(2, ((ONE, equal), (TWO, different), (TWO, NO)))
    assert not survey
    assert not survey.equal
    assert survey.headline() == (
        "NOT EQUAL to one rank: 1 of 2 plans on 2 ranks (1 more are not possible for this model)."
    )
    assert str(survey).splitlines()[3].endswith("m 4   DIFFERENT  step 1, the forward of 2")


def test_a_sweep_without_a_plan_that_can_run_is_not_equal() -> None:
    survey = Sweep(1, ((ONE, NO),))
    assert not survey
    assert survey.headline() == "NOTHING to compare: this model runs by none of 1 plans on 1 rank."
    assert "not possible" in str(survey)


def test_an_empty_sweep_is_not_equal() -> None:
    """Rows that no degree of dp divides leave no plan."""
    survey = Sweep(2, ())
    assert not survey
    assert str(survey).startswith("NOTHING to compare")


def test_a_sweep_in_exact_mode_is_equal_bit_by_bit() -> None:
    survey = Sweep(1, ((Plan(microbatches=2), verify_here(mlp_case(mode="exact", steps=1))),))
    assert survey.headline() == "EQUAL to one rank: all 1 plans on 1 rank, bit by bit."
    assert "%" not in str(survey)


def test_a_sweep_is_written_as_json(equal: VerificationReport, different: VerificationReport) -> None:
    survey = Sweep(2, ((ONE, equal), (TWO, different), (TWO, NO)))
    read: dict[str, Any] = json.loads(json.dumps(survey.as_json(), allow_nan=False))
    assert (read["equal"], read["ranks"]) == (False, 2)
    assert [plan["equal"] for plan in read["plans"]] == [True, False, None]
    assert read["plans"][2] == {
        "plan": read["plans"][2]["plan"],
        "equal": None,
        "reason": NO.reason,
    }
    assert read["plans"][2]["plan"]["schedule"] == "zb-h1"
    assert read["plans"][1]["first"]["phase"] == "forward"
