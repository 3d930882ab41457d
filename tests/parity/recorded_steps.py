"""Engines whose segments are recorded and replayed, with `OperationRecorder` in place of CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

import plait
from parity import reference, woven
from parity.case import SEED, Case, Recipe
from parity.outcome import Outcome
from parity.parity import compare
from parity.repeated_operations import OperationRecorder, OperationRecording
from plait.engine import Engine
from plait.engine.cuda_graphs.segment_graphs import GraphCounts, SegmentGraphs
from plait.engine.parallelize import build_engine
from plait.plan.plan import Plan

FIVE_STEPS = Recipe(steps=5)
"""Two eager ones, one that is recorded, and two that are replayed."""


def recording_engine(case: Case, plan: Plan, **options: Any) -> Engine:
    """The case's engine on this rank, which records its segments after two eager steps."""
    engine = build_engine(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    engine._runner.record_segments(OperationRecorder(), **options)
    return engine


def graphs_of(engine: Engine) -> SegmentGraphs:
    """What the engine has recorded."""
    assert engine._runner.graphs is not None
    return engine._runner.graphs


def recordings(engine: Engine) -> list[OperationRecording]:
    """All that the engine has recorded, segment by segment."""
    every: Any = [segment.recording for one in graphs_of(engine).recorded for segment in one.segments]
    return every  # type: ignore[no-any-return]


def train(case: Case, plan: Plan, recipe: Recipe) -> tuple[Outcome, GraphCounts]:
    """What the recipe gives with replayed segments, and how many there were."""
    engine = recording_engine(case, plan)
    return woven.carry_out(recipe, engine, case), graphs_of(engine).counts


def check_replayed(ranks: Any, case: Case, plan: Plan, recipe: Recipe = FIVE_STEPS) -> list[GraphCounts]:
    """Compare all ranks with one rank, which records nothing; return the counts of graphs of each rank."""
    dtype = woven.DTYPES[plan.precision]
    expected = reference.train(case, woven.global_rows(plan), recipe, dtype)
    results = ranks.run(train, case, plan, recipe, ranks=plan.world)
    compare([outcome for outcome, _ in results], expected, dtype)
    return [counts for _, counts in results]


def have_same_gradients(one: Engine, other: Engine) -> bool:
    """Whether the gradients of two engines have the same bits."""
    pairs = zip(woven.gradients_of(one).values(), woven.gradients_of(other).values(), strict=True)
    return all(torch.equal(mine, others) for mine, others in pairs)
