"""The order of a step and the cut of a model, found together."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import PlanError, ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.schedule import Schedule
from plait.schedules.search import stage_cuts as module
from plait.schedules.search.api import schedule
from plait.schedules.search.layer_costs import LayerCosts
from plait.schedules.search.stage_cuts import StageCut, schedule_and_cut

COSTS = LayerCosts.evenly([1.0] * 8)


def makespan_of(cut: StageCut, made: Schedule) -> float:
    return simulate(made, COSTS.of_stages(cut)).makespan


def refuse_chunks(refused: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit is kept with some numbers of chunks only."""

    def within_limit(*arguments: Any, chunks: int, **options: Any) -> Schedule:
        if chunks in refused:
            raise ScheduleError(f"{chunks} chunks do not keep the limit.")
        return schedule(*arguments, chunks=chunks, **options)

    module._automatic.cache_clear()  # what was found before nobody asks for again
    monkeypatch.setattr(module, "schedule", within_limit)


def test_the_shortest_number_of_chunks_wins() -> None:
    made, cut = schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)
    alone = [
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2, chunks=chunks) for chunks in range(1, 5)
    ]
    assert makespan_of(cut, made) == min(makespan_of(own, one) for one, own in alone)
    assert made.stages > 2


@pytest.mark.parametrize("refused", [{1}, {4}, {1, 3, 4}], ids=str)
def test_a_number_of_chunks_that_does_not_keep_the_limit_is_passed_over(
    refused: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_chunks(refused, monkeypatch)
    made, cut = schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)
    assert made.stages // 2 not in refused
    assert (len(cut), sum(cut)) == (made.stages, 8)


def test_auto_is_refused_where_no_number_of_chunks_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScheduleError, match=r"^a limit of 0\.5 is below .* hold at least 1\.$"):
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2, limit=0.5)
    refuse_chunks({1, 2, 3, 4}, monkeypatch)
    with pytest.raises(ScheduleError, match=r"^4 chunks do not keep the limit"):
        schedule_and_cut("auto", COSTS, ranks=2, microbatches=2)


@pytest.mark.parametrize(("policy", "stages"), [("auto", 4), ("zb-v", 4), ("1f1b", 2)])
def test_a_cut_by_hand_is_taken_as_it_is(policy: str, stages: int) -> None:
    by_hand = {4: (1, 3, 2, 2), 2: (3, 5)}[stages]
    made, cut = schedule_and_cut(policy, COSTS, ranks=2, microbatches=2, cut=by_hand)
    assert (made.stages, cut) == (stages, by_hand)


@pytest.mark.parametrize("policy", ["auto", "1f1b"])
def test_a_cut_by_hand_of_another_number_of_stages_is_refused(policy: str) -> None:
    with pytest.raises(PlanError, match=r"\[2, 3, 3\] does not cut 8 layers into 2 stages"):
        schedule_and_cut(policy, COSTS, ranks=2, microbatches=2, cut=(2, 3, 3))
