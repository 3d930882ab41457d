from __future__ import annotations

import pytest
from schedule_cases import written

from plait.errors import ScheduleError

TWO_STAGES_EACH = written(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], rank_of=(0, 1, 1, 0), microbatches=1)


def test_a_schedule_counts_ranks_and_stages_and_knows_whether_it_trains() -> None:
    assert (TWO_STAGES_EACH.ranks, TWO_STAGES_EACH.stages) == (2, 4)
    assert [TWO_STAGES_EACH.stages_of(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert TWO_STAGES_EACH.trains
    assert not written(["0F0"], rank_of=(0,), microbatches=1).trains


def test_the_order_of_a_schedule_is_the_text_of_its_actions() -> None:
    assert TWO_STAGES_EACH.order == (("0F0", "3F0", "3B0", "0B0"), ("1F0", "2F0", "2B0", "1B0"))


def test_a_schedule_prints_as_its_grid() -> None:
    assert str(TWO_STAGES_EACH) == "\n".join(
        [
            "rank 0  0F0  .   .  3F0 3B0  .   .  0B0",
            "rank 1   .  1F0 2F0  .   .  2B0 1B0  .",
        ]
    )


def test_equal_schedules_are_equal_and_hash_alike() -> None:
    same = written(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], rank_of=(0, 1, 1, 0), microbatches=1)
    assert same == TWO_STAGES_EACH
    assert hash(same) == hash(TWO_STAGES_EACH)
    assert same.bound is None
    assert same.grid is same.grid


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_stage_on_a_rank_without_actions_is_refused(rank: int) -> None:
    told = f"stage 1 is on rank {rank}, but there are actions for ranks 0 to 0"
    with pytest.raises(ScheduleError, match=told):
        written(["0F0 0B0"], (0, rank), 1)


def test_a_schedule_without_ranks_or_stages_is_refused() -> None:
    for rows, rank_of in (([], (0,)), (["0F0 0B0"], ())):
        with pytest.raises(ScheduleError, match=r"^a schedule without ranks or stages: "):
            written(rows, rank_of, 1)
