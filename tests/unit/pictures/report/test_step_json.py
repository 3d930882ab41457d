"""A recorded step: its timeline, the time of each rank by use, and the traffic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic_runs import write_metrics, write_recorded_step

from plait.pictures.report.run_record import read_run
from plait.pictures.report.sections import sections_of
from plait.pictures.report.step_json import (
    MOST_ROWS,
    RecordedRank,
    RecordedStep,
    in_order,
    write_step,
)


def test_the_shares_of_a_ranks_time_add_up_to_the_step(tmp_path: Path) -> None:
    step = write_recorded_step(tmp_path, 2, 3)
    first, last = step.bounds
    for _, uses in step.uses():
        assert sum(uses.values()) == pytest.approx((last - first) / 1e9)
        assert uses["computing"] == pytest.approx(
            (24 - 16 * 0.2) * 1e-3
        )  # 8 F and 8 B, each with a wait of 0.2
        assert uses["tp"] == pytest.approx(16 * 0.2e-3)


def test_a_step_timeline_groups_rows_by_pipeline_up_to_a_limit(tmp_path: Path) -> None:
    assert write_recorded_step(tmp_path, 2, 3).shown_ranks == [0, 3, 1, 4, 2, 5]
    many = write_recorded_step(tmp_path, 8, 16)
    assert len(many.shown_ranks) == MOST_ROWS
    assert many.shown_ranks[:8] == list(range(0, 128, 16))


def test_the_table_of_many_ranks_lists_those_that_compute_most_and_least(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    ranks = tuple(
        RecordedRank(((0, "F", 0, 0, rank),), (("tp", 32, 32),) * (rank == 0), {}) for rank in range(32)
    )
    for count, shown in (
        (16, [*range(16)]),
        (17, [*range(16, 8, -1), *range(7, -1, -1)]),
        (32, [*range(31, 23, -1), *range(7, -1, -1)]),
    ):
        write_step(RecordedStep(1, "1f1b", 1, (0,), ranks[:count]), tmp_path)
        page = "".join(sections_of([read_run(tmp_path)]))
        assert [int(rank) for rank in re.findall(r"<td>rank (\d+)</td>", page)] == shown


def test_traffic_is_summed_over_ranks_with_the_most_of_one() -> None:
    ranks = tuple(
        RecordedRank((), (), {"tp": {"all_reduce": (rank + 1, 10)}, "pp": {"send": (1, 100)}})
        for rank in range(3)
    )
    step = RecordedStep(1, "1f1b", 1, (0,), ranks)
    assert list(step.traffic()) == [
        ("pp", "send", 1, 100, 300),
        ("tp", "all_reduce", 3, 10, 30),
    ]


def test_waits_and_traffic_of_experts_have_their_own_names(tmp_path: Path) -> None:
    """Exchanges of tokens are those of `ep`; sums of experts' gradients count with those of all others."""
    write_metrics(tmp_path, 1)
    blocked = ("ep_etp", 0, 2), ("replicate_edp", 2, 5), ("edp", 5, 6), ("dp", 6, 10)
    traffic = {"ep_etp": {"all_to_all": (4, 100)}, "replicate_edp": {"all_reduce": (1, 20)}}
    step = RecordedStep(1, "1f1b", 1, (0,), (RecordedRank(((0, "F", 0, 0, 20),), blocked, traffic),))
    ((_, uses),) = step.uses()
    assert (uses["ep"], uses["dp"]) == (2e-9, 8e-9)
    write_step(step, tmp_path)
    page = "".join(sections_of([read_run(tmp_path)]))
    assert "<td>ep × etp</td>" in page
    assert "<td>replicate × edp</td>" in page


def test_overlapping_waits_of_a_rank_are_cut_to_follow_each_other() -> None:
    rank = RecordedRank((), (("tp", 5, 9), ("pp", 0, 6), ("dp", 1, 2)), {})
    assert in_order(rank) == [("pp", 0, 6), ("tp", 6, 9)]
