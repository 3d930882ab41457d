"""Steps whose segments are recorded and replayed train as one rank: every gradient, in float64."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from parity import reference, woven
from parity.case import SEED, Case, Recipe
from parity.cases import gpt2
from parity.outcome import Outcome
from parity.pairs import covering_rows
from parity.parity import compare
from parity.repeated_operations import OperationRecorder
from parity.rows import name_of, plan_of
from plait.engine import Engine
from plait.engine.parallelize import build_engine
from plait.plan.plan import Plan

FIVE_STEPS = Recipe(steps=5)
"""Two eager ones, one that is recorded, and two that are replayed."""
FACTORS = {
    "schedule": ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "v-min"),
    "model": ((1, 1), (2, 1), (4, 1)),
    "data": ((1, 1), (2, 1), (2, 2)),
    "tied": (True, False),
    "microbatches": (1, 2, 4, 5),
    "strategy": ("none", "optimizer", "gradients", "full"),
    "reduce": ("last", "each"),
    "recompute": ("none", "selective", "full"),
    "compile": (False, "graphs"),
}
"""`model`: pp and tp; `data`: dp and replicate."""


def allowed(row: dict[str, Any]) -> bool:
    (pp, tp), (dp, _) = row.get("model", (1, 1)), row.get("data", (1, 1))
    return pp * tp * dp <= 4


def recording_engine(case: Case, plan: Plan, **options: Any) -> Engine:
    """The case's engine on this rank, which records its segments after two eager steps."""
    engine = build_engine(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    engine._runner.record_segments(OperationRecorder(), **options)
    return engine


def train(case: Case, plan: Plan, recipe: Recipe) -> tuple[Outcome, Any]:
    """What the recipe gives with replayed segments, and how many there were."""
    engine = recording_engine(case, plan)
    outcome = woven.carry_out(recipe, engine, case)
    assert engine._runner.graphs is not None
    return outcome, engine._runner.graphs.counts


def check(thread_ranks: Any, case: Case, plan: Plan, recipe: Recipe = FIVE_STEPS) -> list[Any]:
    """Compare all ranks with one rank, which records nothing; return the counts of graphs of each rank."""
    dtype = woven.DTYPES[plan.precision]
    expected = reference.train(case, woven.global_rows(plan), recipe, dtype)
    results = thread_ranks.run(train, case, plan, recipe, ranks=plan.world)
    compare([outcome for outcome, _ in results], expected, dtype)
    return [counts for _, counts in results]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_replayed_segments_train_as_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    given = {name: value for name, value in row.items() if name != "tied"}
    plan = plan_of({**given, "cuda_graphs": True})
    for counts in check(thread_ranks, gpt2(layers=3, tied=row["tied"]), plan):
        assert counts.replayed >= 2 * counts.recorded > 0
        assert set(counts.eager) == {"the first steps of a shape"}
