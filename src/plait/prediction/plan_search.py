"""`search`: the fastest plans of a number of ranks that fit the memory, exactly as `predict` judges them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from plait.errors import PlanError
from plait.plan import Plan
from plait.prediction.decoder import Decoder, stage_kinds
from plait.prediction.framework import PLAIT, Framework
from plait.prediction.hardware import Hardware
from plait.prediction.memory_by_size import predicted_memory
from plait.prediction.plan_bounds import Bounds
from plait.prediction.plan_space import PlanChoices, RankDivision, divisions
from plait.prediction.step_prediction import Prediction, predict
from plait.prediction.step_times import NANOSECOND, StepTimes, stage_modes
from plait.schedules.schedule import Schedule
from plait.schedules.stage_cuts.layer_costs import LayerCosts
from plait.schedules.stage_cuts.schedule_and_cut import schedule_and_cut

ALL = PlanChoices()


@dataclass(frozen=True)
class PlanSearchResult:
    """The fastest plans that fit, and what became of the others."""

    best: tuple[Prediction, ...]
    """Fastest first; their plans leave the cut to `parallelize`, which makes the same."""
    plans: int
    """Plans of the space whose divisions are possible."""
    predicted: int
    """Plans of which the step was simulated."""
    too_large: int
    """Plans that need more memory than a device has."""
    slower: int
    """Plans that a lower bound of their step time rules out; whether they fit was not computed."""
    impossible: Mapping[str, int]
    """Divisions of the ranks that model or batch do not allow, by reason."""


def search(
    model: Decoder,
    hardware: Hardware,
    ranks: int,
    batch: int,
    *,
    base: Plan | None = None,
    choices: PlanChoices = ALL,
    most: int = 10,
    framework: Framework = PLAIT,
) -> PlanSearchResult:
    """Return the `most` fastest plans of `ranks` ranks for `batch` sequences a step over all of them.

    `base` has what is not searched, such as the precisions. A plan is left out only where a lower bound of
    its time is above the times of all that are returned, or a lower bound of its memory above the device's:
    the result is that of predicting every plan. Raises PlanError where the ranks cannot be divided.
    """
    found, impossible = divisions(model, ranks, batch)
    if not found:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in impossible.most_common())
        raise PlanError(
            f"{ranks} ranks cannot be divided for this model and a batch of {batch}: {reasons}: change the "
            "ranks, the batch or the sizes."
        )
    run = _PlanQueue(Bounds(model, hardware, batch, framework), base or Plan(), choices)
    for division in found:
        run.add(division)
    best: list[Plan] = []
    while run.queue and len(best) < most:
        plan = run.next()
        if plan is not None:
            best.append(plan)
    plans, counts = run.plans, run.counts
    slower = plans - counts["too large"] - counts["fits"]
    return PlanSearchResult(
        tuple(run.prediction(plan) for plan in best),
        plans,
        counts["fits"],
        counts["too large"],
        slower,
        impossible,
    )


@dataclass
class _PlanQueue:
    """A queue of divisions, options, plans with a schedule, with a cut, and predicted, by bounds of time.

    What comes out first cannot be beaten by what is left; a predicted plan has its time in place of a bound.
    """

    bounds: Bounds
    base: Plan
    choices: PlanChoices
    queue: list[tuple[float, int, RankDivision | Plan, str]] = field(default_factory=list)
    plans: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _added: int = 0
    _cuts: dict[tuple[object, ...], tuple[Schedule, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, division: RankDivision) -> None:
        """Add a division with the bound of its fastest options: no recomputation, nothing sharded."""
        sequence = self.choices.sequence_parallel if division.tp > 1 else self.choices.sequence_parallel[:1]
        bound = min(
            self._pipeline(division.plan(self.base, sequence_parallel=one, recompute="none", strategy="none"))
            for one in sequence
        )
        options = sum(1 for _ in division.options(self.base, self.choices))
        self.plans += options * len(division.schedules(len(self.bounds.model.kinds), self.choices))
        self._push(bound, division, "division")

    def next(self) -> Plan | None:
        """Take the first of the queue: put what follows from it back, or return it if it is predicted."""
        _, _, one, stage = heappop(self.queue)
        if isinstance(one, RankDivision):
            for plan in one.options(self.base, self.choices):
                self._push(self._pipeline(plan) + self.bounds.optimizer_seconds(plan), plan, "options")
        elif stage == "options":
            self._add_schedules(one)
        elif stage == "plan":
            self._add_cut(one)
        elif stage == "cut":
            self._predict(one)
        else:
            return one
        return None

    def prediction(self, plan: Plan) -> Prediction:
        """Return the whole prediction of a plan; the plan in it has no cut."""
        cut = self._cut(plan)[1]
        rows = self.bounds.batch // plan.dp
        whole = predict(
            self.bounds.model,
            replace(plan, layers_per_stage=cut),
            self.bounds.hardware,
            rows=rows,
            framework=self.bounds.framework,
        )
        return replace(whole, plan=plan)

    def _pipeline(self, plan: Plan, policy: str | None = None, chunks: int = 1) -> float:
        return self.bounds.pipeline_seconds(plan, self.bounds.model_time(plan), policy, chunks)

    def _add_schedules(self, plan: Plan) -> None:
        division = RankDivision(plan.pp, plan.dp, plan.cp, plan.tp, plan.microbatches)
        schedules = division.schedules(len(self.bounds.model.kinds), self.choices)
        if self.bounds.memory(plan) > self.bounds.hardware.memory:
            self.counts["too large"] += len(schedules)
            return
        after = self.bounds.optimizer_seconds(plan)
        for policy, chunks in schedules:
            if self.bounds.memory(plan, policy) > self.bounds.hardware.memory:
                self.counts["too large"] += 1
                continue
            bound = self._pipeline(plan, policy, chunks) + after
            self._push(bound, replace(plan, schedule=policy, chunks=chunks), "plan")

    def _add_cut(self, plan: Plan) -> None:
        """Put a plan back with the bound that its cut into stages gives: a rank does all its work in turn."""
        step = self._step(plan)
        ranks = range(plan.pp)
        work = [sum(step.passes[stage].total.total for stage in step.schedule.stages_of(r)) for r in ranks]
        rounding = 1.5 * NANOSECOND * len(step.stages)
        busy = plan.microbatches * (max(work) - rounding)
        bound = busy + max(sum(step.optimizer(rank)) for rank in ranks)
        self._push(bound * (1 - 1e-9), plan, "cut")

    def _predict(self, plan: Plan) -> None:
        """Put a plan back with its predicted time if it fits, as `predict` does."""
        step, hardware = self._step(plan), self.bounds.hardware
        memory = predicted_memory(step.timer.shape, step.schedule, step.stages, step.modes, hardware.reserved)
        if max(rank.allocated + rank.reserved for rank in memory) > hardware.memory:
            self.counts["too large"] += 1
            return
        self.counts["fits"] += 1
        self._push(sum(step.breakdown.values()), plan, "predicted")

    def _step(self, plan: Plan) -> StepTimes:
        schedule, cut = self._cut(plan)
        stages = stage_kinds(self.bounds.model.kinds, cut)
        return StepTimes(self.bounds.timer(plan), schedule, stages, stage_modes(plan, cut))

    def _cut(self, plan: Plan) -> tuple[Schedule, tuple[int, ...]]:
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches)
        if key not in self._cuts:
            self._cuts[key] = schedule_and_cut(
                plan.schedule,
                LayerCosts.evenly(self.bounds.model.layer_costs).with_messages(plan.pp),
                ranks=plan.pp,
                microbatches=plan.microbatches,
                chunks=plan.chunks,
                limit=plan.memory_limit,
            )
        return self._cuts[key]

    def _push(self, bound: float, one: RankDivision | Plan, stage: str) -> None:
        self._added += 1
        heappush(self.queue, (bound, self._added, one, stage))
