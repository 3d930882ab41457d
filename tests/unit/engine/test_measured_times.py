"""MeasuredAction rows as a timeline and as costs: what was simulated comes back."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.step_recorder import (
    TICK,
    MeasuredAction,
    measured_costs,
    measured_timeline,
    measured_waits,
)
from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell

START = 7_000_000_123
"""Where the clock stands when the step begins."""


def row(text: str) -> tuple[MeasuredAction, ...]:
    """`0F0 5-9` ran from 5 to 9; `0B0 2>5-9` waited for its gradient from 2 on."""
    done = []
    for part in text.split(", "):
        name, times = part.split()
        asked, _, ran = times.rpartition(">")
        start, end = ran.split("-")
        done.append(MeasuredAction(Action.parse(name), int(start), int(end), int(asked) if asked else None))
    return tuple(done)


TWO_RANKS = Schedule("mine", 2, (0, 1), tuple(tuple(map(Action.parse, names.split())) for names in (
    "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
)))  # fmt: skip
ROWS = (
    row("0F0 1000-1100, 0F1 1110-1230, 0B0 1240>1500-1700, 0B1 1710>1800-2020"),
    row("1F0 900>1120-1240, 1I0 1250-1450, 1W0 1470-1500, 1F1 1510>1520-1630, 1I1 1640-1760, 1W1 1770-1830"),
)


def rows_of(timeline: Timeline) -> list[tuple[MeasuredAction, ...]]:
    """As if it had been measured: a rank asks for what it needs when it has done what was before."""
    schedule = timeline.schedule
    rows = []
    for rank, cells in enumerate(timeline.cells):
        done, free = [], 0
        for action, start, end in cells:
            source = None if action.kind is Kind.W else action.source_stage(schedule.stages)
            remote = source is not None and schedule.rank_of[source] != rank
            asked = START + free if remote else None
            done.append(MeasuredAction(action, START + start, START + end, asked))
            free = end
        rows.append(tuple(done))
    return rows


def test_measured_times_give_a_timeline_of_the_recorded_actions() -> None:
    timeline = measured_timeline(TWO_RANKS, ROWS)
    assert timeline.schedule.order == (
        ("0F0", "0F1", "0B0", "0B1"),
        ("1F0", "1I0", "1W0", "1F1", "1I1", "1W1"),
    )
    assert timeline.schedule.policy == "mine"
    assert timeline.cells[0][0] == (Action.parse("0F0"), 0, 100)
    assert timeline.cells[1][0] == (Action.parse("1F0"), 120, 240)
    assert timeline.makespan == pytest.approx(1020e-6)
    assert timeline.peak == (2.0, 1.0)
    assert timeline.hop == 20  # 0F0 to 1F0; the others took longer
    busy = 100 + 120 + 200 + 220, 120 + 200 + 30 + 110 + 120 + 60
    assert timeline.bubble == pytest.approx(1 - sum(busy) / (2 * 1020))


def test_measured_costs_are_medians_of_actions_and_waits_are_sums() -> None:
    costs = measured_costs(TWO_RANKS, ROWS)
    assert costs.F == (110e-6, 115e-6)
    assert costs.I == (105e-6, 160e-6)  # half of B on the first stage
    assert costs.W == (105e-6, 45e-6)
    # Waited for when they were made: 1F0 (20), 0B0 (50), 0B1 (40); not 1F1.
    assert costs.comm == 40e-6
    assert measured_waits(ROWS) == (350e-6, 230e-6)


def test_the_measured_cost_of_a_hop_is_0_where_no_rank_waits() -> None:
    alone = (row("0F0 0-10, 0B0 10-30"),)
    order = Schedule("alone", 1, (0,), (tuple(done.action for done in alone[0]),))
    costs = measured_costs(order, alone)
    assert (costs.F, costs.I, costs.W, costs.comm) == ((10e-6,), (10e-6,), (10e-6,), 0)
    assert measured_timeline(order, alone).hop == 0


def test_a_stage_without_recorded_actions_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no F of stage 1 was measured"):
        measured_costs(TWO_RANKS, (ROWS[0], ()))


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-min"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.integers(1, 30),
)
def test_costs_measured_from_a_simulated_timeline_are_those_simulated(
    policy: str, ranks: int, microbatches: int, times: tuple[int, ...], comm: int
) -> None:
    order = policy_schedule(policy, ranks, microbatches)
    # Exact, and a tick is a nanosecond, as one of the costs is.
    per_stage = [[Fraction(time + stage, 10**6) for stage in range(order.stages)] for time in times]
    simulated = simulate(order, Costs(*per_stage, comm=Fraction(comm, 10**6)))  # type: ignore[arg-type]
    scale = int(simulated.tick * 10**6)
    cells = tuple(
        tuple(Cell(action, start * scale, end * scale) for action, start, end in row)
        for row in simulated.cells
    )
    in_nanoseconds = replace(simulated, tick=TICK, cells=cells)
    rows = rows_of(in_nanoseconds)
    back = measured_timeline(order, rows)
    assert back.cells == cells
    assert (back.makespan, back.bubble, back.peak) == (simulated.makespan, simulated.bubble, simulated.peak)
    assert back.memory_curve == in_nanoseconds.memory_curve
    costs = measured_costs(order, rows)
    assert [Fraction(str(cost)) for cost in costs.F] == per_stage[0]  # type: ignore[union-attr]
    both = [Fraction(str(i)) + Fraction(str(w)) for i, w in zip(costs.I, costs.W, strict=True)]  # type: ignore[arg-type]
    assert both == [i + w for i, w in zip(*per_stage[1:], strict=True)]
    assert costs.comm in ((0, comm / 1e6) if ranks > 1 else (0,))
    if costs.comm:
        assert simulate(back.schedule, costs).makespan == simulated.makespan
