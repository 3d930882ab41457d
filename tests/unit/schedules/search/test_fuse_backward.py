from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from search_cases import any_costs, problem_of, schedule_of

from plait.pictures.timelines.timeline import simulate
from plait.schedules.action import Action, Kind
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search.auto_search import fuse_backward
from plait.schedules.search.initial_orders import initial_orders, orders_from


def written(*rows: str, rank_of: tuple[int, ...] = (0, 1)) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", 2, rank_of, actions)


BOTH = written("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(row) for row in schedule.order]


def test_backward_halves_of_the_first_stage_are_fused() -> None:
    alone = written("0F0 0I0 0W0 0F1 0I1 0W1", rank_of=(0,))
    assert rows_of(fuse_backward(alone, Costs())) == ["0F0 0B0 0F1 0B1"]


def test_backward_halves_are_not_fused_where_another_rank_waits_for_the_gradient() -> None:
    # rank 0  F0 F1  . I0 W0  . I1 W1
    # rank 1   . F0 I0 W0 F1 I1 W1
    assert rows_of(fuse_backward(BOTH, Costs())) == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"]


def test_backward_halves_are_fused_where_the_receiver_is_still_busy() -> None:
    # Rank 0 does F1 until 12, rank 1 turns micro-batch 0 until 8 and weighs it until 10, or comm later.
    costs = [Costs([6, 1], 1, 2, comm=comm) for comm in (0, 1, 1.5)]
    assert [rows_of(fuse_backward(BOTH, each))[1] for each in costs] == [
        "1F0 1B0 1F1 1I1 1W1",
        "1F0 1B0 1F1 1I1 1W1",  # there at 12
        "1F0 1I0 1W0 1F1 1I1 1W1",  # it would be there at 13
    ]


def test_fusing_between_stages_of_one_rank_counts_no_hop() -> None:
    rows = "0F0 1F0 1I0 1W0 0I0 0W0 0F1 1F1 1I1 1W1 0I1 0W1"
    costs = Costs(comm=5)
    assert rows_of(fuse_backward(written(rows, rank_of=(0, 0)), costs)) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


def test_a_weight_gradient_that_comes_later_is_not_fused() -> None:
    rows = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W0 1W1")
    assert rows_of(fuse_backward(written(*rows), Costs())) == list(rows)


def test_fusing_leaves_a_schedule_of_full_backwards_unchanged() -> None:
    made = policy_schedule("1f1b", 3, 5)
    assert fuse_backward(made, Costs()) == made


def test_fusing_changes_only_the_actions_of_a_schedule() -> None:
    made = replace(policy_schedule("zb-h1", 3, 4), bound=1.5)
    assert replace(fuse_backward(made, Costs()), actions=made.actions) == made


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    layout, ranks = draw(
        st.sampled_from((((Placement.LINEAR, 1), 3), ((Placement.V, 2), 2), ((Placement.LOOP, 2), 2)))
    )
    costs = draw(any_costs(ranks * layout[1]))
    problem = problem_of(layout, ranks, 4, costs)
    number = draw(st.integers(0, 40))
    start = next(islice(initial_orders(problem, Random(0)), number, None))
    return schedule_of(problem, orders_from(problem, start)), costs


@given(timed())
def test_fusing_changes_no_makespan_peak_or_start_of_other_actions(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    joined = fuse_backward(schedule, costs)
    check(joined)
    before, after = simulate(schedule, costs), simulate(joined, costs)
    assert (after.makespan, after.span, after.peak) == (before.makespan, before.span, before.peak)
    starts_before = {cell.action: cell.start for row in before.cells for cell in row}
    for row in after.cells:
        for (stage, kind, microbatch), start, _ in row:
            known = Action(stage, Kind.I if kind is Kind.B else kind, microbatch)
            assert starts_before[known] == start


def pairs(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Where an input gradient has its weight gradient right behind it."""
    for rank, row in enumerate(schedule.actions):
        for position, (first, second) in enumerate(pairwise(row)):
            if first.kind is Kind.I and second == first._replace(kind=Kind.W):
                yield rank, position


@given(timed())
def test_fusing_any_remaining_pair_would_delay_an_action(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    left = fuse_backward(schedule, costs)
    starts_left = {cell.action: cell.start for row in simulate(left, costs).cells for cell in row}
    for rank, position in pairs(left):
        row = left.actions[rank]
        both = row[position]._replace(kind=Kind.B)
        rows = list(left.actions)
        rows[rank] = (*row[:position], both, *row[position + 2 :])
        cells = simulate(replace(left, actions=tuple(rows)), costs).cells
        assert any(
            cell.start > starts_left[cell.action]
            for cells_of in cells
            for cell in cells_of
            if cell.action != both
        )
