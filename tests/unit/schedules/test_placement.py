from __future__ import annotations

import pytest

from plait.schedules.schedule import Placement

DEALT = {
    (Placement.LINEAR, 4, 1): "0 1 2 3",
    (Placement.LOOP, 4, 1): "0 1 2 3",
    (Placement.V, 4, 1): "0 1 2 3",
    (Placement.LOOP, 4, 2): "0 1 2 3  0 1 2 3",
    (Placement.V, 4, 2): "0 1 2 3  3 2 1 0",
    (Placement.LOOP, 2, 3): "0 1  0 1  0 1",
    (Placement.V, 3, 3): "0 1 2  2 1 0  0 1 2",
    (Placement.V, 1, 2): "0  0",
}


@pytest.mark.parametrize(("placement", "ranks", "chunks"), DEALT)
def test_each_placement_gives_each_stage_its_listed_rank(
    placement: Placement, ranks: int, chunks: int
) -> None:
    dealt = tuple(map(int, DEALT[placement, ranks, chunks].split()))
    assert placement.rank_of(ranks, chunks) == dealt


def test_placements_are_called_linear_loop_and_v() -> None:
    assert [Placement(name) for name in ("linear", "loop", "v")] == list(Placement)
