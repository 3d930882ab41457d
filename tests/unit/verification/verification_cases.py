"""What the tests of the verifier share: small cases, a verification without any other rank, short forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import Case as ParityCase
from plait.plan import axes
from plait.plan.plan import Plan
from plait.tensor.losses import Loss, cross_entropy
from plait.verification.case import Case
from plait.verification.findings import Difference, Evidence
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome, verify_rank
from plait.verification.report import VerificationReport
from plait.verification.step_location import Location, StepPhase
from plait.verification.sweep import RefusedPlan, verify_plans
from plait.verification.verify import build_report

ROWS, CLASSES = 4, 5


def mlp() -> nn.Sequential:
    """Four layers with real values: `[rows, 6]` to 5 classes."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES))


def rows_and_classes(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """A batch for `mlp`."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(rows, 6, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def mlp_case(*, loss: Loss = cross_entropy, rows: int = ROWS, **options: Any) -> Case:
    """`mlp` on the same batch in each step, as `plait.verify` makes it."""
    made = VerifyOptions(**options)
    return Case(mlp(), loss, [rows_and_classes(rows)] * made.steps, made, device="cpu", timeout=60.0)


def case_of(case: ParityCase, *, rows: int = 4, **options: Any) -> Case:
    """A case of the parity tests, on batches that differ from step to step."""
    made = VerifyOptions(**options)
    batches = case.batches(rows, made.steps, torch.float64)
    return Case(case.build, case.loss, batches, made, device="cpu", timeout=60.0)


def verify_here(case: Case, plan: Plan = Plan(microbatches=2)) -> VerificationReport:  # noqa: B008 (frozen)
    """Verify a plan of one rank in this process."""
    return build_report([verify_rank(case, plan)], plan, case.options)


def coordinates_of(plan: Plan) -> list[dict[str, int]]:
    """Where each rank of a plan stands."""
    sizes = axes.sizes_of_plan(plan)
    return [axes.coordinate_of(rank, sizes) for rank in range(plan.world)]


def difference_at(location: Location, expected: Tensor, actual: Tensor, **changes: Any) -> Difference:
    """A difference of whole tensors, without what a report only repeats."""
    apart = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    told: dict[str, Any] = {
        "largest": float(apart.max()),
        "size": float(expected.abs().max()),
        "allowed": 1e-13,
        "shape": tuple(actual.shape),
        "box": tuple((0, size) for size in actual.shape),
        "whole_box": True,
        "share": 1.0,
        "worst": (0,) * actual.dim(),
        "values": (float(actual.flatten()[0]), float(expected.flatten()[0])),
    }
    return Difference(location, **(told | changes))


def evidence_of(
    location: Location, expected: Tensor, actual: Mapping[int, Tensor], base: Tensor | None = None
) -> dict[int, Evidence]:
    """What each rank has instead of `expected`."""
    flat = None if base is None else base.flatten()
    return {rank: Evidence(location, own.flatten(), expected.flatten(), flat) for rank, own in actual.items()}


def phases_of(outcomes: Sequence[RankOutcome]) -> set[StepPhase]:
    """The phases in which anything was compared."""
    return {phase for outcome in outcomes for phase in outcome.findings.tallies}


def label(plan: Plan) -> str:
    """A plan's name among a test's parameters."""
    recompute = "" if plan.recompute == "none" else f"-{plan.recompute}"
    context = f"-cp{plan.cp}-{plan.context_parallel}-{plan.context_layout}" if plan.cp > 1 else ""
    return f"pp{plan.pp}-dp{plan.dp}{context}-tp{plan.tp}-{plan.schedule}{recompute}"


def run_each(case: Case, plans: Sequence[Plan]) -> list[RankOutcome | RefusedPlan]:
    """`verify_plans`, for ranks: every plan on the same number of them."""
    return verify_plans(case, plans)
