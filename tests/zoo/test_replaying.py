"""The check of replayed segments names each mistake's first segment and cause; others are errors that do."""

from __future__ import annotations

from typing import Any

import pytest

from parity import woven
from parity.capturable import TensorAdam
from parity.case import Case
from parity.cases import gpt2
from parity.dropping import DROPPING
from parity.recorded_steps import graphs_of, recording_engine
from plait.engine.cuda_graphs.replay_check import ReplayCheck
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.tensor.nested_values import map_tensors
from zoo.replaying import REPLAYING, SHARDED, TWO_STAGES, ReplayRow


def differences(case: Case, plan: Plan, shortens: bool = False) -> tuple[list[Any], int]:
    """What a check finds in the fifth step, with loss scale 4 and twice the rate, and how much it replays.

    `shortens`: that step's batch has a position less.
    """
    engine = recording_engine(case, plan)
    optimizer = TensorAdam(engine.parameters(), 0.01)
    batches = woven.shares(case, engine, 5)
    for batch in batches[:4]:
        engine.forward_backward(*batch)
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
    graphs = graphs_of(engine)
    graphs.check = ReplayCheck(engine.runtime.units, engine.runtime.dropout)
    engine._runner.scale.value = 4.0
    replayed = graphs.counts.replayed
    last = [map_tensors(lambda tensor: tensor[:, :-1], one) if shortens else one for one in batches[4]]
    engine.forward_backward(*last)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    engine.step(optimizer, 1.0)
    return graphs.check.differences, graphs.counts.replayed - replayed


@pytest.mark.parametrize("case", [gpt2(layers=2, tied=True), DROPPING], ids=lambda case: case.name)
@pytest.mark.parametrize("plan", [TWO_STAGES, SHARDED], ids=["pp 2", "dp 2, full"])
def test_the_check_finds_no_difference_where_there_is_none(thread_ranks: Any, case: Case, plan: Plan) -> None:
    for found, replayed in thread_ranks.run(differences, case, plan, ranks=plan.world):
        assert (found, replayed > 0) == ([], True)


@pytest.mark.parametrize("row", REPLAYING, ids=lambda row: row.defect.__name__)
def test_each_mistake_is_found_with_its_segment_and_cause(thread_ranks: Any, row: ReplayRow) -> None:
    arguments = row.case, row.plan, row.shortens
    with row.defect():
        if row.is_refused:
            with pytest.raises(PlanError, match=f"{row.segment}.*{row.cause}"):
                thread_ranks.run(differences, *arguments, ranks=row.plan.world)
            return
        found, _ = thread_ranks.run(differences, *arguments, ranks=row.plan.world)[0]
    assert found[0].segment == row.segment
    assert found[0].what.startswith(row.what)
    assert row.cause in found[0].cause
