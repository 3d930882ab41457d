"""Every layout and schedule that a number of ranks allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.blueprint import SCHEDULES
from plait.errors import DataError, ModelError, PlanError, ScheduleError
from plait.plan import Plan
from plait.verification.case import Case
from plait.verification.rank import Outcome, Recordings, run_rank


@dataclass(frozen=True)
class Refused:
    """A plan that this model cannot be woven by, and why."""

    reason: str


def plans_on(ranks: int, plan: Plan, rows: int) -> tuple[Plan, ...]:
    """Every plan on `ranks` ranks that cuts a global batch of `rows` rows as finely as `plan` does.

    A rank of dp runs fewer micro-batches where there are more of them. What `plan` says besides is kept;
    a cut by hand only where it fits.
    """
    return tuple(
        replace(
            plan,
            pp=pp,
            dp=dp,
            tp=tp,
            replicate=plan.replicate if dp % plan.replicate == 0 else 1,
            microbatches=_share(plan.dp * plan.microbatches, dp, rows),
            schedule=schedule,
            layers_per_stage=plan.layers_per_stage if pp == plan.pp else None,
        )
        for pp, dp, tp in _degrees(ranks)
        if rows % dp == 0
        for schedule in SCHEDULES
    )


def _degrees(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Three factors of `ranks`, pipelines first."""
    for pp in range(ranks, 0, -1):
        for dp in range(1, ranks // pp + 1):
            if ranks % (pp * dp) == 0:
                yield pp, dp, ranks // (pp * dp)


def _share(microbatches: int, dp: int, rows: int) -> int:
    """Micro-batches of one rank of dp: its part of all, or the next smaller number that cuts its rows."""
    most = max(1, microbatches // dp)
    return next(count for count in range(most, 0, -1) if rows // dp % count == 0)


def run_all(case: Case, plans: Sequence[Plan]) -> list[Outcome | Refused]:
    """Verify plan after plan as one of their ranks; they have the same number of ranks."""
    recordings: Recordings = {}
    return [_run(case, plan, recordings) for plan in plans]


def _run(case: Case, plan: Plan, recordings: Recordings) -> Outcome | Refused:
    try:
        return run_rank(case, plan, recordings)
    except (PlanError, ModelError, ScheduleError, DataError) as error:
        # Raised by every rank alike, before any waits for another.
        return Refused(str(error))
