"""The order of a step and the cut of a model, found together."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import PlanError, ScheduleError
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule import schedule
from plait.schedules.stage_cuts import LayerCosts, order, ordered_cut
from plait.schedules.stage_cuts.cut import makespan_of

COSTS = LayerCosts.evenly([1.0] * 8)


def refuse_chunks(refused: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit is kept with some numbers of chunks only."""

    def within_limit(*arguments: Any, chunks: int, **options: Any) -> Schedule:
        if chunks in refused:
            raise ScheduleError(f"{chunks} chunks do not keep the limit.")
        return schedule(*arguments, chunks=chunks, **options)

    order._automatic.cache_clear()  # what was found before nobody asks for again
    monkeypatch.setattr(order, "schedule", within_limit)


def test_the_shortest_number_of_chunks_wins() -> None:
    made, cut = ordered_cut("auto", COSTS, ranks=2, microbatches=2)
    alone = [ordered_cut("auto", COSTS, ranks=2, microbatches=2, chunks=chunks) for chunks in range(1, 5)]
    assert makespan_of(cut, COSTS, made) == min(makespan_of(own, COSTS, one) for one, own in alone)
    assert made.stages > 2


@pytest.mark.parametrize("refused", [{1}, {4}, {1, 3, 4}], ids=str)
def test_a_number_of_chunks_that_does_not_keep_the_limit_is_passed_over(
    refused: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_chunks(refused, monkeypatch)
    made, cut = ordered_cut("auto", COSTS, ranks=2, microbatches=2)
    assert made.stages // 2 not in refused
    assert (len(cut), sum(cut)) == (made.stages, 8)


def test_it_is_refused_where_no_number_of_chunks_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScheduleError, match=r"^a limit of 0\.5 is below .* hold at least 1\.$"):
        ordered_cut("auto", COSTS, ranks=2, microbatches=2, limit=0.5)
    refuse_chunks({1, 2, 3, 4}, monkeypatch)
    with pytest.raises(ScheduleError, match=r"^4 chunks do not keep the limit"):
        ordered_cut("auto", COSTS, ranks=2, microbatches=2)


@pytest.mark.parametrize(("policy", "stages"), [("auto", 4), ("zb-v", 4), ("1f1b", 2)])
def test_a_cut_by_hand_is_taken_as_it_is(policy: str, stages: int) -> None:
    by_hand = {4: (1, 3, 2, 2), 2: (3, 5)}[stages]
    made, cut = ordered_cut(policy, COSTS, ranks=2, microbatches=2, cut=by_hand)
    assert (made.stages, cut) == (stages, by_hand)


@pytest.mark.parametrize("policy", ["auto", "1f1b"])
def test_a_cut_by_hand_of_another_number_of_stages_is_refused(policy: str) -> None:
    with pytest.raises(PlanError, match=r"\[2, 3, 3\] does not cut 8 layers into 2 stages"):
        ordered_cut(policy, COSTS, ranks=2, microbatches=2, cut=(2, 3, 3))
