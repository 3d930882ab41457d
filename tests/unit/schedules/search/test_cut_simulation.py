"""Makespans of cuts against the timeline of the same schedule and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import Timing, event_order, simulate_events
from plait.schedules.search.api import schedule
from plait.schedules.search.layer_costs import LayerCosts, balance
from plait.schedules.search.stage_cuts import CutSimulation

POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half")


@given(
    policy=st.sampled_from(POLICIES),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    costs=st.lists(st.floats(0.01, 10), min_size=8, max_size=12),
    split=st.booleans(),
    message=st.sampled_from((0.0, 0.1, 1.7)),
)
def test_the_makespan_is_that_of_the_timeline(policy, ranks, microbatches, costs, split, message) -> None:
    made = schedule(policy, ranks=ranks, microbatches=microbatches)
    made = made.split_backward if split else made
    layers = LayerCosts.evenly(costs)
    layers = LayerCosts(layers.F, layers.I, layers.W, comm=message, message=message / 7)
    cut = balance(costs, made.stages)
    simulation = CutSimulation(layers, made)
    expected = simulate(made, layers.of_stages(cut)).makespan
    assert simulation.makespan(cut) / 2**simulation._exponent == pytest.approx(expected, rel=1e-9)


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 4), split=st.booleans(), data=st.data())
def test_no_cut_takes_less_than_the_lower_bound(policy, ranks, split, data) -> None:
    made = schedule(policy, ranks=ranks, microbatches=data.draw(st.integers(1, 6)))
    made = made.split_backward if split else made
    cut = data.draw(st.lists(st.integers(1, 3), min_size=made.stages, max_size=made.stages))
    each = st.lists(st.floats(0.01, 10), min_size=sum(cut), max_size=sum(cut))
    layers = LayerCosts(
        data.draw(each), data.draw(each), data.draw(each), comm=data.draw(st.sampled_from((0.0, 0.4)))
    )
    simulation = CutSimulation(layers, made)
    assert simulation.least(cut) <= simulation.makespan(cut)


def test_the_lower_bound_is_reached_where_nothing_waits() -> None:
    layers = LayerCosts.evenly([1.0] * 8)
    for policy in ("zb-h1", "zb-v"):
        made = schedule(policy, ranks=4, microbatches=6).split_backward
        simulation, cut = CutSimulation(layers, made), balance(layers.total, made.stages)
        assert simulation.least(cut) == simulation.makespan(cut), policy


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 4), data=st.data())
def test_the_last_ends_are_those_of_the_event_simulation(policy, ranks, data) -> None:
    made = schedule(policy, ranks=ranks, microbatches=data.draw(st.integers(1, 6)))
    times = st.lists(st.integers(0, 99), min_size=made.stages, max_size=made.stages)
    timing = Timing({kind: data.draw(times) for kind in Kind}, data.draw(times), data.draw(times))
    expected = [row[-1] for row in simulate_events(made.actions, timing).ends]
    assert event_order(made.actions, made.stages).last_ends(timing) == expected


def test_a_deadlocked_order_is_refused_by_the_cut_simulation() -> None:
    rows = ((Action(0, Kind.I, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0), Action(1, Kind.I, 0)))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0I0"):
        event_order(rows, 2)
