"""`plait verify --all`: verifies every layout, schedule and sharding for a number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from typing import Any, get_args

from plait.errors import DataError, ModelError, PlanError, ScheduleError
from plait.plan.plan import (
    ContextLayout,
    ContextParallel,
    Offload,
    Plan,
    Recompute,
    Reduce,
    SequenceParallel,
    Strategy,
)
from plait.schedules.search.schedule_by_policy import POLICY_NAMES, default_chunks
from plait.verification.case import Case
from plait.verification.rank_verification import RankOutcome, RecordingCache, verify_rank
from plait.verification.report import VerificationReport, layout_of, when

ReportProgress = Callable[[int, int], None]
"""Given the number of plans that are done, and of all."""
STRIDE = 5
"""Of the shardings of a layout with cp every fifth is the next: neighbours differ in one choice only."""
LOSS_ROWS = 5
"""Rows of logits at once, where the loss is computed in chunks: the last chunk of most losses is smaller."""
SCHEDULE_WIDTH = max(map(len, POLICY_NAMES))


@dataclass(frozen=True)
class RefusedPlan:
    """Why a plan in a sweep cannot run this model."""

    reason: str


@dataclass(frozen=True)
class Sweep:
    """The reports of all plans of `verify --all`; true if all are equal. `print` shows a line per plan."""

    ranks: int
    rows: tuple[tuple[Plan, VerificationReport | RefusedPlan], ...]

    @property
    def reports(self) -> tuple[VerificationReport, ...]:
        """The reports on the plans that can run."""
        return tuple(result for _, result in self.rows if isinstance(result, VerificationReport))

    @property
    def compared(self) -> int:
        """Number of compared tensors, over all plans and ranks: 0 where no plan can run."""
        return sum(report.compared for report in self.reports)

    @property
    def equal(self) -> bool:
        """Whether at least one plan can run, and all runnable plans equal the run on one rank."""
        return bool(self.reports) and all(self.reports)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        width = max((len(layout_of(plan)) for plan, _ in self.rows), default=0)
        lines = [_row(plan, result, width) for plan, result in self.rows]
        return "\n".join([self.headline(), "", *lines])

    def headline(self) -> str:
        """Return one line: whether all runnable plans equal the run on one rank, and how closely."""
        reports, refused = self.reports, len(self.rows) - len(self.reports)
        rest = f" ({refused} more are not possible for this model)" if refused else ""
        wrong = sum(not report for report in reports)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if not reports:
            return f"NOTHING to compare: this model runs by none of {refused} plans on {ranks}."
        if wrong:
            return f"NOT EQUAL to one rank: {wrong} of {len(reports)} plans on {ranks}{rest}."
        used = max(report.used for report in reports)
        closeness = (
            "bit by bit" if reports[0].options.mode == "exact" else f"{used:.0%} of what rounding explains"
        )
        return f"EQUAL to one rank: all {len(reports)} plans on {ranks}, {closeness}{rest}."

    def as_json(self) -> dict[str, Any]:
        """Return the reports of all plans as a dict of JSON values; see docs/reference/command-line.md."""
        return {
            "equal": self.equal,
            "ranks": self.ranks,
            "plans": [
                {"plan": asdict(plan), "equal": None, "reason": result.reason}
                if isinstance(result, RefusedPlan)
                else result.as_json()
                for plan, result in self.rows
            ],
        }


def _row(plan: Plan, result: VerificationReport | RefusedPlan, width: int) -> str:
    start = f"  {layout_of(plan):<{width}}  {plan.schedule:<{SCHEDULE_WIDTH}}  m {plan.microbatches:<3}"
    if isinstance(result, RefusedPlan):
        return f"{start} not possible: {result.reason}"
    if result.first is not None:
        location = result.first.difference.location
        return f"{start} DIFFERENT  {when(location)}, {result.what(location)}"
    worst = max(tally.relative for tally in result.tallies.values())
    closeness = "" if result.options.mode == "exact" else f"  {worst:.1e}  {result.used:>4.0%}"
    return f"{start} equal{closeness}  {result.seconds:.1f} s"


def plans_on(
    ranks: int,
    plan: Plan,
    rows: int,
    *,
    in_parts: bool = False,
    in_chunks: bool = False,
    with_experts: bool = False,
) -> tuple[Plan, ...]:
    """Return the plans on `ranks` ranks that a sweep verifies, with about as many micro-batches as `plan`.

    Every layout with every schedule, activations kept and recomputed; and every layout with every sharding,
    each with the next schedule and the next mode of recomputation. Where layers can run `in_parts` of the
    sequence, every layout with tp does so in both ways with every mode of recomputation, each with the next
    schedule and the next sharding; then follows every layout with cp, by ring and by Ulysses, with each
    layout of positions, and each with the next of all these. A model `with_experts` divides them in every
    way over the ranks of every layout, each with the next sharding, schedule and mode. Where the loss can be
    computed `in_chunks` of rows, every layout without cp does so once, likewise. More ranks of dp
    have fewer micro-batches each. The other fields of `plan` are kept, also its recomputation, sequence
    parallelism and `context_parallel`, if any; `layers_per_stage` only where it has a count for each stage.
    """
    modes = get_args(Recompute) if plan.recompute == "none" else (plan.recompute,)
    extremes = tuple(dict.fromkeys((modes[0], modes[-1])))
    # Three modes would always meet the same of the nine schedules and of the three kinds of offload.
    in_turns = (*modes, modes[-1])
    both = get_args(SequenceParallel)[1:] if in_parts and plan.sequence_parallel == "none" else ()
    schedules, turns = cycle(POLICY_NAMES), cycle(modes)
    plans = []
    for pp, dp, tp in _degrees(ranks):
        if rows % dp:
            continue
        layout = _with_degrees(plan, rows, pp=pp, dp=dp, tp=tp)
        plans += [_with_schedule(layout, *way) for way in product(POLICY_NAMES, extremes)]
        plans += map(_with_schedule, _shardings_of(layout), cycle(POLICY_NAMES), cycle(in_turns))
        sharded = cycle((layout, *_shardings_of(layout)))
        for way, mode in product(both if tp > 1 else (), modes):
            plans.append(_with_schedule(replace(next(sharded), sequence_parallel=way), next(schedules), mode))
        if in_chunks and plan.loss_rows is None:
            one = replace(next(sharded), loss_rows=LOSS_ROWS)
            plans.append(_with_schedule(one, next(schedules), next(turns)))
    if in_parts:
        plans += _context_parallel(ranks, plan, rows)
    if with_experts:
        plans += _dividing_experts(ranks, plan, rows, in_parts=in_parts)
    return tuple(dict.fromkeys(plans))


def _context_parallel(ranks: int, plan: Plan, rows: int) -> Iterator[Plan]:
    """Yield the plans of a sweep in which cp ranks hold positions of each sequence."""
    given = plan.context_parallel
    methods = get_args(ContextParallel)[1:] if given == "auto" else (given,)
    given_mode, given_way = plan.recompute, plan.sequence_parallel
    # Three modes would always meet the same of the three layouts of positions.
    modes = cycle((*get_args(Recompute), "full") if given_mode == "none" else (given_mode,))
    ways = cycle((*get_args(SequenceParallel), "keep") if given_way == "none" else (given_way,))
    schedules, turn = cycle(POLICY_NAMES), 0
    for cp in range(2, ranks + 1):
        for pp, dp, tp in _degrees(ranks // cp) if ranks % cp == 0 else ():
            if rows % dp:
                continue
            plain = _with_degrees(plan, rows, pp=pp, dp=dp, cp=cp, tp=tp)
            sharded = (plain, *_shardings_of(plain))
            for method, kind in product(methods, get_args(ContextLayout)):
                one = replace(sharded[turn % len(sharded)], context_parallel=method, context_layout=kind)
                way = next(ways) if tp > 1 else given_way
                yield _with_schedule(replace(one, sequence_parallel=way), next(schedules), next(modes))
                turn += STRIDE


def _dividing_experts(ranks: int, plan: Plan, rows: int, *, in_parts: bool) -> Iterator[Plan]:
    """Yield the plans of a sweep in which experts are divided over `ep` and `etp`."""
    given = plan.recompute
    modes = cycle((*get_args(Recompute), "full") if given == "none" else (given,))
    schedules, turn = cycle(POLICY_NAMES), 0
    for cp in range(1, ranks + 1 if in_parts else 2):
        for pp, dp, tp in _degrees(ranks // cp) if ranks % cp == 0 else ():
            if rows % dp:
                continue
            plain = _with_degrees(plan, rows, pp=pp, dp=dp, cp=cp, tp=tp)
            for ep, etp in _divisions(dp * cp * tp):
                sharded = [
                    one for one in (plain, *_shardings_of(plain)) if one.shard * cp * tp % (ep * etp) == 0
                ]
                if sharded:
                    one = replace(sharded[turn % len(sharded)], ep=ep, etp=etp)
                    yield _with_schedule(one, next(schedules), next(modes))
                turn += STRIDE


def _divisions(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield all (ep, etp) whose product divides `ranks`, but 1 · 1."""
    for ep in range(1, ranks + 1):
        for etp in range(1, ranks // ep + 1):
            if ranks % (ep * etp) == 0 and ep * etp > 1:
                yield ep, etp


def _with_degrees(plan: Plan, rows: int, *, pp: int, dp: int, tp: int, cp: int = 1) -> Plan:
    """Return `plan` with other degrees, and up to as many equal micro-batches as a rank of dp then has."""
    most = max(1, plan.dp * plan.microbatches // dp)
    count = next(count for count in range(most, 0, -1) if rows // dp % count == 0)
    replicate = plan.replicate if dp % plan.replicate == 0 else 1
    whole = replace(plan, ep=1, etp=1)
    return replace(whole, pp=pp, dp=dp, cp=cp, tp=tp, replicate=replicate, microbatches=count)


def _with_schedule(plan: Plan, schedule: str, recompute: Recompute | tuple[Recompute, ...]) -> Plan:
    cut = plan.layers_per_stage
    if cut is not None:
        chunks = plan.chunks or default_chunks(schedule, ranks=plan.pp, stages=len(cut))
        cut = cut if len(cut) == plan.pp * chunks else None
    return replace(plan, schedule=schedule, recompute=recompute, layers_per_stage=cut)


def _shardings_of(plan: Plan) -> Iterator[Plan]:
    """Yield `plan` with each valid choice of `replicate`, `strategy`, `reduce` and `offload` that shards."""
    for replicate in range(1, plan.dp + 1):
        if plan.dp % replicate == 0 and plan.cp * plan.dp > replicate:
            for strategy, reduce, offload in product(*map(get_args, (Strategy, Reduce, Offload))):
                if strategy in ("gradients", "full") or (strategy == "optimizer" and reduce == "last"):
                    yield replace(
                        plan, replicate=replicate, strategy=strategy, reduce=reduce, offload=offload
                    )


def _degrees(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (pp, dp, tp) whose product is `ranks`, the largest pp first."""
    for pp in range(ranks, 0, -1):
        for dp in range(1, ranks // pp + 1):
            if ranks % (pp * dp) == 0:
                yield pp, dp, ranks // (pp * dp)


def verify_plans(
    case: Case, plans: Sequence[Plan], report_progress: ReportProgress | None = None
) -> list[RankOutcome | RefusedPlan]:
    """Verify `plans`, all of the same number of ranks, in turn on this rank; return outcomes or refusals.

    Calls `report_progress` on rank 0 after each plan that has run.
    """
    recordings: RecordingCache = {}
    outcomes: list[RankOutcome | RefusedPlan] = []
    for plan in plans:
        try:
            outcome = verify_rank(case, plan, recordings)
        except (PlanError, ModelError, ScheduleError, DataError) as error:
            # Raised by every rank alike, before any waits for another.
            outcomes.append(RefusedPlan(str(error)))
            continue
        outcomes.append(outcome)
        if report_progress is not None and outcome.rank == 0:
            report_progress(len(outcomes), len(plans))
    return outcomes
