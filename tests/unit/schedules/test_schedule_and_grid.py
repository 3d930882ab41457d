"""A schedule as data and as text, its placements, and the grid of its steps."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given
from schedule_cases import UNHURRIED, has_its_needs, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Grid, Placement, Schedule, draw_grid, fill_grid

TWO = written(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], rank_of=(0, 1), microbatches=2)
STUCK = written(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], rank_of=(0, 1), microbatches=2)


def shown(text: str) -> str:
    return dedent(text).strip("\n")


def test_each_action_takes_one_step() -> None:
    assert fill_grid(TWO.actions, stages=2) == Grid(((0, 1, 3, 5), (1, 2, 3, 4)), {})


def test_the_grid_of_1f1b_on_two_ranks_is_drawn() -> None:
    assert draw_grid(TWO.actions, TWO.grid) == shown("""
        rank 0  0F0 0F1  .  0B0  .  0B1
        rank 1   .  1F0 1B0 1F1 1B1  .
    """)


def test_actions_that_never_run_are_drawn_where_their_turn_would_come() -> None:
    assert STUCK.grid == Grid(((0,), (1,)), {0: Action(1, Kind.I, 0), 1: Action(0, Kind.F, 1)})
    assert [STUCK.grid.step((0, place)) for place in range(4)] == [0, 1, 2, 3]
    assert draw_grid(STUCK.actions, STUCK.grid, mark=Action(0, Kind.B, 0)) == shown("""
        rank 0   0F0  [0B0]  0F1   0B1    .
        rank 1    .    1F0   1F1   1B0   1B1
    """)


def test_actions_of_a_rank_that_never_starts_are_drawn_from_the_first_step() -> None:
    rows = written(["0B0 0F0", "1F0 1B0"], rank_of=(0, 1), microbatches=1).actions
    assert draw_grid(rows, fill_grid(rows, stages=2)) == shown("""
        rank 0  0B0 0F0
        rank 1  1F0 1B0
    """)


@pytest.mark.parametrize(
    ("place", "picture"),
    [
        (
            0,
            """
            rank 0   0F0   0B0   0F1   0B1   0F2   0B2   0F3  …
            rank 1    .     .     .     .     .     .     .   …
            """,
        ),
        (
            7,
            """
            rank 0  …  0B0   0F1   0B1   0F2   0B2   0F3  [0B3]  0F4   0B4   0F5   0B5   0F6   0B6  …
            rank 1  …   .     .     .     .     .     .     .     .     .     .     .     .     .   …
            """,
        ),
        (
            15,
            """
            rank 0  …  0B4   0F5   0B5   0F6   0B6   0F7   0B7
            rank 1  …   .     .     .     .     .     .     .
            """,
        ),
    ],
)
def test_a_grid_drawn_around_a_cell_is_shortened_on_both_sides(place: int, picture: str) -> None:
    rows = *policy_schedule("1f1b", 1, 8).actions, ()
    assert draw_grid(rows, fill_grid(rows, stages=1), around=(0, place), mark=Action(0, Kind.B, 3)) == shown(
        picture
    )


def test_numbers_of_two_digits_keep_the_columns() -> None:
    tall = policy_schedule("gpipe", 11, 1)
    assert draw_grid(tall.actions, tall.grid, around=(10, 0)).splitlines()[8:] == [
        "rank 8   …  .    .    .    .   8F0   .    .    .    .   8B0   .    .    .   …",
        "rank 9   …  .    .    .    .    .   9F0   .    .   9B0   .    .    .    .   …",
        "rank 10  …  .    .    .    .    .    .   10F0 10B0  .    .    .    .    .   …",
    ]


def test_an_empty_schedule_is_drawn_as_an_empty_grid() -> None:
    assert draw_grid([], fill_grid([], stages=0)) == ""
    assert draw_grid([()], fill_grid([()], stages=1)) == "rank 0  ."


def test_an_action_of_an_unknown_stage_is_drawn() -> None:
    rows = written(["0F0 0B0 7F0"], rank_of=(0,), microbatches=1).actions
    assert (
        draw_grid(rows, fill_grid(rows, stages=1), mark=Action(7, Kind.F, 0)) == "rank 0   0F0   0B0  [7F0]"
    )
    for missing in (-1, 1):
        assert fill_grid([(Action(0, Kind.F, 0), Action(missing, Kind.F, 0))], stages=1).steps == ((0,),)


@UNHURRIED
@given(legal_schedules())
def test_an_action_stands_at_the_first_step_at_which_all_that_it_needs_is_done(made: Schedule) -> None:
    done: set[Action] = set()
    counts = [0] * made.ranks
    for step in range(sum(len(row) for row in made.actions)):
        ready = [
            rank
            for rank, row in enumerate(made.actions)
            if counts[rank] < len(row) and has_its_needs(row[counts[rank]], done, made.stages)
        ]
        assert ready == [rank for rank, steps in enumerate(made.grid.steps) if step in steps]
        for rank in ready:
            assert made.grid.steps[rank][counts[rank]] == step
            done.add(made.actions[rank][counts[rank]])
            counts[rank] += 1
    assert not made.grid.missing


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
