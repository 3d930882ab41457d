"""A mistake, where it is shown, and what the report on it has to name."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from parity import case as parity
from parity.woven import global_rows
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome, verify_rank
from plait.verification.report import VerificationReport
from plait.verification.step_location import StepPhase
from plait.verification.verify import build_report

Defect = Callable[[], AbstractContextManager[object]]
"""A mistake, while it is entered."""
ONE_STEP = VerifyOptions(steps=1, perturbations=1)
TWO_STEPS = VerifyOptions(steps=2, perturbations=1)


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the report's first difference has to be; what is None does not matter."""

    phase: StepPhase
    layer: str | None = None
    """Its path; of a forward message the layer that it comes from, of a backward one that it is for."""
    parameter: str | None = None
    """A pattern of its whole name."""
    microbatch: int | None = None
    step: int = 0
    ranks: tuple[int, ...] | None = None
    cause: str = ""
    """A pattern of a word or two."""
    also: tuple[StepPhase, ...] = ()
    """Phases that are as good."""

    def missed_by(self, report: VerificationReport) -> list[str]:
        """What the report says otherwise, in sentences."""
        if report.first is None:
            return ["no difference at all"]
        location = report.first.difference.location
        wrong = [
            f"{what} {said!r} instead of {wanted!r}"
            for what, wanted, said in (
                ("layer", self.layer, report.first.layer),
                ("micro-batch", self.microbatch, location.microbatch),
                ("step", self.step, location.step),
                ("ranks", self.ranks, report.first.ranks),
            )
            if wanted is not None and wanted != said
        ]
        if location.phase not in (self.phase, *self.also):
            wrong.append(f"phase {str(location.phase)!r} instead of {str(self.phase)!r}")
        if self.parameter is not None and not re.fullmatch(self.parameter, location.name):
            wrong.append(f"parameter {location.name!r} instead of {self.parameter!r}")
        return wrong

    def explained_by(self, report: VerificationReport) -> bool:
        """Whether the report says why."""
        return report.first is not None and re.search(self.cause, report.first.cause) is not None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A mistake of the zoo."""

    defect: Defect
    model: parity.Case
    plan: Plan
    named: Named
    options: VerifyOptions = ONE_STEP
    missed: str = ""
    """Why the verifier is known to name another place; counted against it."""
    unexplained: str = ""
    """Why it is known to give another cause; counted as well."""
    full: bool = False
    """Shown in the full run only."""

    @property
    def name(self) -> str:
        """What is wrong."""
        return self.defect.__name__


def case_of(model: parity.Case, plan: Plan, options: VerifyOptions = ONE_STEP) -> Case:
    """What is verified: the model, on other data in each step."""
    batches = model.batches(global_rows(plan), options.steps, torch.float64)
    return Case(model.build(), model.loss, batches, options, timeout=30.0)


def run_within(defect: Defect, case: Case, plan: Plan) -> RankOutcome:
    """One rank of a verification, in which something is wrong."""
    with defect():
        return verify_rank(case, plan)


def report_of(
    pool: RankPool,
    model: parity.Case,
    plan: Plan,
    defect: Defect = nullcontext,
    options: VerifyOptions = ONE_STEP,
) -> VerificationReport:
    """What the verifier says."""
    case = case_of(model, plan, options)
    return build_report(pool.run(run_within, defect, case, plan, ranks=plan.world), plan, case.options)
