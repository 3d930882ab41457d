"""`WorkDivision`: how the work of a step is divided over stages and replicas of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.app.loop.stream import RankStream
from plait.app.loop.training_loop import TrainingLoop
from plait.engine.engine import from_json, to_json
from plait.errors import PlanError, listed
from plait.ranks.text_collectives import broadcast_result
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import StageCut


@dataclass(frozen=True)
class WorkDivision:
    """How the work of a step is divided: layers over stages, rows over replicas; and the actions' order."""

    cut: StageCut
    """The number of layers of each stage."""
    order: Schedule
    rows: tuple[int, ...]
    """How many rows of a batch each replica takes, by index along `dp`."""

    @property
    def shares(self) -> list[float]:
        """The rows of each replica, divided by those of an equal share."""
        return [rows * len(self.rows) / sum(self.rows) for rows in self.rows]

    def changes_from(self, before: WorkDivision) -> str:
        """Return the differences from the division `before`, as text."""
        changes = []
        if self.cut != before.cut:
            changes.append(f"stages of {_listed(self.cut)} layers in place of {_listed(before.cut)}")
        if self.rows != before.rows:
            changes.append(f"replicas of {_listed(self.rows)} rows in place of {_listed(before.rows)}")
        if self.order.actions != before.order.actions:
            changes.append("another order of actions")
        return " and ".join(changes)


def _listed(counts: Sequence[int]) -> str:
    return listed([*map(str, counts)])


def work_of(run: TrainingLoop) -> WorkDivision:
    """Return how a run divides its work now."""
    engine = run.engine
    return WorkDivision(engine.blueprint.layers_per_stage, engine.schedule, run.rows_of_replicas)


def why_rows_stay(run: TrainingLoop) -> str:
    """Return, as a clause, why replicas of the model have to take equally many rows; "": they need not."""
    engine, replicas = run.engine, run.mesh.size("dp")
    microbatches = engine.plan.microbatches
    if replicas == 1:
        return "the model has one replica"
    if isinstance(run.batches, RankStream):
        return "a stream gives all replicas equally many rows"
    if not run.gives_uncut_rows:
        return "batches are given in micro-batches, or as parts of sequences"
    if engine.plan.cuda_graphs:
        return "CUDA graphs are recorded for equally many rows"
    if engine.runtime.balance is not None:
        return "the model has routers"
    if run.batches.size <= microbatches * replicas:
        return f"each replica has one row for each of its {microbatches} micro-batches"
    return ""


def agreed_division(run: TrainingLoop, search: Callable[[], WorkDivision]) -> WorkDivision:
    """Return on every rank the result of `search()`, which is called on rank 0 only.

    All ranks wait for it, some seconds at most. Communication: as text over `world`.
    """

    def searched() -> str:
        found = search()
        return json.dumps({"cut": found.cut, "rows": found.rows, "order": to_json(found.order)})

    text = broadcast_result(searched, PlanError, run.mesh.group("world"), run.mesh.device)
    found, order = json.loads(text), run.engine.schedule
    return WorkDivision(tuple(found["cut"]), from_json(found["order"], order) or order, tuple(found["rows"]))
