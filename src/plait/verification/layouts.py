"""Every layout, schedule and strategy that a number of ranks allows, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import get_args

from plait.errors import DataError, ModelError, PlanError, ScheduleError
from plait.plan import Offload, Plan, Recompute, Reduce, SequenceParallel, Strategy
from plait.schedules.search.schedule import NAMES, usual_chunks
from plait.verification.case import Case
from plait.verification.rank_verification import RankOutcome, RecordingCache, verify_rank

ReportProgress = Callable[[int, int], None]
"""Given how many plans are done, of how many."""


@dataclass(frozen=True)
class RefusedPlan:
    """A plan that this model cannot be woven by, and why."""

    reason: str


def plans_on(ranks: int, plan: Plan, rows: int, *, in_pieces: bool = False) -> tuple[Plan, ...]:
    """Every plan on `ranks` ranks that cuts a global batch of `rows` rows as finely as `plan` does.

    Every layout with every schedule, activations kept and recomputed; and every layout with every way to
    shard it, each with the next schedule and the next mode of recomputation. Where layers can run `in_pieces`
    of the sequence, every layout with tp does so in both ways with every mode of recomputation, each with the
    next schedule and the next way to shard. A rank of dp runs fewer micro-batches where there are more of
    them. What `plan` says besides is kept, also what it recomputes, if anything, and what it does with
    sequences; a cut by hand only where it has a count for each stage.
    """
    modes = get_args(Recompute) if plan.recompute == "none" else (plan.recompute,)
    extremes = tuple(dict.fromkeys((modes[0], modes[-1])))
    # Three modes would always meet the same of the nine schedules and of the three kinds of offload.
    in_turns = (*modes, modes[-1])
    both = get_args(SequenceParallel)[1:] if in_pieces and plan.sequence_parallel == "none" else ()
    schedules = cycle(NAMES)
    plans = []
    for pp, dp, tp in _degrees(ranks):
        if rows % dp:
            continue
        layout = replace(
            plan,
            pp=pp,
            dp=dp,
            tp=tp,
            replicate=plan.replicate if dp % plan.replicate == 0 else 1,
            microbatches=_share(plan.dp * plan.microbatches, dp, rows),
        )
        plans += [_run_as(layout, *way) for way in product(NAMES, extremes)]
        plans += map(_run_as, _sharded(layout), cycle(NAMES), cycle(in_turns))
        held = cycle((layout, *_sharded(layout)))
        for way, mode in product(both if tp > 1 else (), modes):
            plans.append(_run_as(replace(next(held), sequence_parallel=way), next(schedules), mode))
    return tuple(dict.fromkeys(plans))


def _run_as(plan: Plan, schedule: str, recompute: Recompute | tuple[Recompute, ...]) -> Plan:
    cut = plan.layers_per_stage
    if cut is not None:
        chunks = plan.chunks or usual_chunks(schedule, ranks=plan.pp, stages=len(cut))
        cut = cut if len(cut) == plan.pp * chunks else None
    return replace(plan, schedule=schedule, recompute=recompute, layers_per_stage=cut)


def _sharded(plan: Plan) -> Iterator[Plan]:
    """Every way to shard over the plan's ranks of dp: strategy, copies, moment of reduction, offload."""
    for replicate in range(1, plan.dp):
        if plan.dp % replicate == 0:
            for strategy, reduce, offload in product(*map(get_args, (Strategy, Reduce, Offload))):
                if strategy in ("gradients", "full") or (strategy == "optimizer" and reduce == "last"):
                    yield replace(
                        plan, replicate=replicate, strategy=strategy, reduce=reduce, offload=offload
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


def verify_plans(
    case: Case, plans: Sequence[Plan], tell: ReportProgress | None = None
) -> list[RankOutcome | RefusedPlan]:
    """Verify plan after plan as one of their ranks; they have the same number of ranks. Rank 0 may `tell`."""
    recordings: RecordingCache = {}
    outcomes = []
    for plan in plans:
        outcomes.append(_run(case, plan, recordings))
        if tell is not None and isinstance(outcomes[-1], RankOutcome) and outcomes[-1].rank == 0:
            tell(len(outcomes), len(plans))
    return outcomes


def _run(case: Case, plan: Plan, recordings: RecordingCache) -> RankOutcome | RefusedPlan:
    try:
        return verify_rank(case, plan, recordings)
    except (PlanError, ModelError, ScheduleError, DataError) as error:
        # Raised by every rank alike, before any waits for another.
        return RefusedPlan(str(error))
