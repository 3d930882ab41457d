"""What ranks hold over time: curves worked out by hand, and against intervals counted one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule


def memory_curve(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The points in the unit of the costs, and in units of one rank's micro-batch."""
    unit = timeline.memory_costs.unit
    return tuple(
        tuple((timeline.time(tick), float(held * unit)) for tick, held in points)
        for points in timeline.memory_curve
    )


tenths = st.integers(0, 30).map(lambda number: number / 10)
costs = st.builds(Costs, tenths, tenths, tenths, tenths, tenths, tenths)


def on_one_rank(row: str) -> Schedule:
    actions = tuple(map(Action.parse, row.split()))
    stages = max(action.stage for action in actions) + 1
    microbatches = max(action.microbatch for action in actions) + 1
    return Schedule("by hand", microbatches, (0,) * stages, (actions,))


@st.composite
def one_rank_schedules(draw: st.DrawFn) -> Schedule:
    """A stage's micro-batches in any order, each with a full backward, one in two parts, or none."""
    left = {
        microbatch: list(draw(st.sampled_from([("F", "B"), ("F", "I", "W"), ("F",)])))
        for microbatch in range(draw(st.integers(1, 4)))
    }
    turns = draw(st.permutations([microbatch for microbatch, kinds in left.items() for _ in kinds]))
    return on_one_rank(" ".join(f"0{left[microbatch].pop(0)}{microbatch}" for microbatch in turns))


def test_a_full_backward_releases_at_its_end_and_nothing_dips_where_one_follows_another() -> None:
    assert memory_curve(simulate(policy_schedule("1f1b", 2, 2))) == (
        ((0, 1), (1, 2), (6, 1), (9, 0)),
        ((1, 1), (7, 0)),
    )


def test_the_input_gradient_ends_the_first_amount_and_the_weight_gradient_the_second() -> None:
    made = on_one_rank("0F0 0F1 0I0 0I1 0W0 0W1")
    assert memory_curve(simulate(made, Costs(until_I=3, until_W=1))) == (
        ((0, 3), (1, 6), (3, 4), (4, 2), (5, 1), (6, 0)),
    )


def test_a_full_backward_counts_as_the_most_that_it_holds_within() -> None:
    made = on_one_rank("0F0 0B0")
    assert memory_curve(simulate(made, Costs(until_I=1, until_W=2))) == (((0, 1), (1, 2), (3, 0)),)


def test_a_chunk_holds_its_part_of_a_micro_batch_in_the_memory_curve() -> None:
    assert memory_curve(simulate(on_one_rank("0F0 1F0 1B0 0B0"))) == (((0, 0.5), (0.5, 1), (2, 0.5), (3, 0)),)


def test_the_memory_curve_shows_amounts_held_for_no_time_first() -> None:
    timeline = simulate(on_one_rank("0F0 0F1 0B0 0B1"), Costs(0, 0, 0))
    assert memory_curve(timeline) == (((0, 2), (0, 0)),)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@given(st.integers(1, 4), st.integers(1, 6), costs)
def test_the_highest_point_of_the_memory_curve_is_the_peak(
    policy: str, ranks: int, microbatches: int, costs: Costs
) -> None:
    timeline = simulate(policy_schedule(policy, ranks, microbatches), costs)
    for points, peak in zip(memory_curve(timeline), timeline.peak, strict=True):
        assert max((held for _, held in points), default=0.0) == peak
        assert all(before[0] <= after[0] for before, after in pairwise(points))
        assert not points or points[-1][1] == 0


@given(one_rank_schedules(), st.builds(Costs, *[st.integers(1, 5)] * 3, st.just(0), tenths, tenths))
def test_the_curve_counts_every_micro_batch_from_its_forward_on(made: Schedule, costs: Costs) -> None:
    timeline = simulate(made, costs)
    (row,), holds = timeline.cells, timeline.memory_costs
    (early,), (late,) = holds.until_input, holds.until_weight
    ends = {kind: {cell.action.microbatch: cell for cell in row if cell.action.kind is kind} for kind in Kind}

    def amount(microbatch: int, tick: int) -> int:
        """What it holds between this tick and the next."""
        if tick < ends[Kind.F][microbatch].start:
            return 0
        if full := ends[Kind.B].get(microbatch):
            return early if tick < full.start else max(early, late) if tick < full.end else 0
        if (inputs := ends[Kind.I].get(microbatch)) is None or tick < inputs.end:
            return early
        return late if tick < ends[Kind.W][microbatch].end else 0

    (steps,) = timeline.memory_curve
    for tick in range(timeline.length):
        expected = sum(amount(microbatch, tick) for microbatch in range(made.microbatches))
        assert [0, *(held for time, held in steps if time <= tick)][-1] == expected
