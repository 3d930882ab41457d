from __future__ import annotations

from schedule_cases import written

TWO_STAGES_EACH = written(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], rank_of=(0, 1, 1, 0), microbatches=1)


def test_counts_and_places() -> None:
    assert (TWO_STAGES_EACH.ranks, TWO_STAGES_EACH.stages) == (2, 4)
    assert [TWO_STAGES_EACH.stages_of(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert TWO_STAGES_EACH.trains
    assert not written(["0F0"], rank_of=(0,), microbatches=1).trains


def test_order_is_text() -> None:
    assert TWO_STAGES_EACH.order == (("0F0", "3F0", "3B0", "0B0"), ("1F0", "2F0", "2B0", "1B0"))


def test_a_picture_has_one_line_per_rank_and_columns() -> None:
    drawn = str(written(["0F0 0B0", "10F0 10B0"], rank_of=(0, 1), microbatches=1))
    assert drawn == "rank 0:  0F0  0B0\nrank 1: 10F0 10B0"
