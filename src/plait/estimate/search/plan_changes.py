"""`best_changes`: which single changes of a plan would make it fit, faster or smaller, by prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.errors import PlaitError
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.search.plan_space import PlanChoices, divisors_of
from plait.plan.plan import Plan

LOSS_ROWS = 1024
"""Rows of logits at once that a change tries where the plan has all of them."""


@dataclass(frozen=True)
class PlanChange:
    """A change of one field of a plan, with the predictions before and after."""

    field: str
    value: object
    before: Prediction
    after: Prediction

    @property
    def seconds(self) -> float:
        """Difference of the step time in seconds; negative: the change is faster."""
        return self.after.step_seconds - self.before.step_seconds

    @property
    def memory(self) -> float:
        """Difference in bytes of the largest memory of any rank; negative: the change needs less."""
        return self.after.peak_memory - self.before.peak_memory


def best_changes(found: Prediction, most: int = 3) -> tuple[PlanChange, ...]:
    """Return the `most` changes of one field of the plan that help most, each with the field's best value.

    Of a plan that fits: those that save most time and still fit. Of another: first those that make it fit,
    fastest first, then those that save most memory. Ranks and rows stay the same; a change of `schedule`
    takes the policy's own chunks.
    """
    changes = []
    for field, plan in _candidates(found):
        try:
            after = predict(found.model, plan, found.hardware, rows=found.rows)
        except PlaitError:
            continue  # such a plan cannot run
        changes.append(PlanChange(field, getattr(plan, field), found, after))
    changes.sort(key=_by_help)
    best: dict[str, PlanChange] = {}
    for one in filter(_helps, changes):
        best.setdefault(one.field, one)
    return tuple(best.values())[:most]


def _helps(one: PlanChange) -> bool:
    if one.before.fits:
        return one.after.fits and one.seconds < 0
    return one.after.fits or one.memory < 0


def _by_help(one: PlanChange) -> tuple[bool, float]:
    return not one.after.fits, one.seconds if one.after.fits else one.memory


def _candidates(found: Prediction) -> Iterator[tuple[str, Plan]]:
    """Yield plans that differ from the predicted one in a field, with the field's name."""
    plan, choices = found.plan, PlanChoices()
    strategies = ("none", "optimizer", "gradients", "full")[plan.offload != "none" :]  # of sharded state
    parts, ranks = plan.ep * plan.etp, plan.shard * plan.cp * plan.tp
    copies = [one for one in divisors_of(plan.dp) if plan.dp // one * plan.cp * plan.tp % parts == 0]
    values: dict[str, Sequence[object]] = {
        "recompute": choices.recompute,
        "sequence_parallel": choices.sequence_parallel if plan.tp > 1 else (),
        "strategy": strategies if plan.dp * plan.cp > 1 else (),
        "reduce": ("last", "each") if plan.strategy in ("gradients", "full") else (),
        "replicate": copies if plan.strategy != "none" else (),
        "ep": [ep for ep in divisors_of(ranks // plan.etp) if ep <= found.model.experts],
        "etp": divisors_of(ranks // plan.ep) if found.model.experts else (),
        "microbatches": divisors_of(found.rows),
        "loss_rows": (None, LOSS_ROWS) if plan.loss_rows in (None, LOSS_ROWS) else (None,),
    }
    for field, tried in values.items():
        yield from ((field, _changed(plan, field, value)) for value in tried if value != getattr(plan, field))
    if plan.pp == 1:
        return
    policies = dict.fromkeys(policy for policy, _ in choices.schedules)
    for policy in policies:
        if policy != plan.schedule:
            yield "schedule", replace(plan, schedule=policy, chunks=None, layers_per_stage=None)
    if plan.schedule == "interleaved":
        for chunks in (2, 3, 4):
            if chunks != (plan.chunks or 2):
                yield "chunks", replace(plan, chunks=chunks, layers_per_stage=None)


def _changed(plan: Plan, field: str, value: object) -> Plan:
    return replace(plan, **{field: value})  # type: ignore[arg-type]
