"""The end of each action in order, as early as possible, and on shared cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, done_by_tokens, legal_schedules, with_row, written

from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import ActionRows, Timing, event_order, simulate_shared
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import schedule


def steady(stages: int, *, forward: int, inputs: int, weights: int, hop: int = 0) -> Timing:
    """Every stage alike, each on a rank of its own."""
    lengths = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights}
    between = [hop] * (stages - 1)
    return Timing({kind: [length] * stages for kind, length in lengths.items()}, [0, *between], [*between, 0])


class EventTimes(NamedTuple):
    ends: list[list[int]]
    missing: Mapping[int, Action]


def simulate_events(rows: ActionRows, timing: Timing) -> EventTimes:
    order = event_order(rows, len(timing.forward_hops))
    return EventTimes(order.ends(timing), order.missing)


def test_a_full_backward_on_two_ranks() -> None:
    """The end of each action, computed by hand, with messages of 10 units of time."""
    made = written(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], rank_of=(0, 1), microbatches=2)
    timing = steady(2, forward=1, inputs=2, weights=3, hop=10)
    assert simulate_events(made.actions, timing) == EventTimes([[1, 2, 32, 38], [12, 17, 18, 23]], {})


def test_a_split_backward_sends_its_gradient_before_its_weight_gradient() -> None:
    made = written(["0F0 0I0 0W0", "1F0 1I0 1W0"], rank_of=(0, 1), microbatches=1)
    timing = steady(2, forward=1, inputs=2, weights=30)
    assert simulate_events(made.actions, timing).ends == [[1, 6, 36], [2, 4, 34]]


def test_hops_belong_to_the_stage_that_they_lead_to() -> None:
    made = written(["0F0 2F0 2B0 0B0", "1F0 1B0"], rank_of=(0, 1, 0), microbatches=1)
    timing = steady(3, forward=1, inputs=1, weights=0)._replace(
        forward_hops=[0, 10, 20], backward_hops=[3, 5, 0]
    )
    assert simulate_events(made.actions, timing).ends == [[1, 33, 34, 44], [12, 40]]


def test_actions_may_take_no_time() -> None:
    made = written(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], rank_of=(0, 1), microbatches=2)
    assert simulate_events(made.actions, steady(2, forward=0, inputs=0, weights=0)) == EventTimes(
        [[0] * 4, [0] * 4], {}
    )


def test_a_rank_may_have_nothing_to_do() -> None:
    made = written(["0F0 0B0", ""], rank_of=(0,), microbatches=1)
    assert simulate_events(made.actions, steady(1, forward=1, inputs=1, weights=1)) == EventTimes(
        [[1, 3], []], {}
    )


def test_every_action_is_read_once() -> None:
    """Also where ranks wait for each other at every other action: the time is linear in their number."""
    read: Counter[int] = Counter()

    class Row(list[Action]):
        def __iter__(self) -> Iterator[Action]:
            for action in list.__iter__(self):
                read[id(self)] += 1
                yield action

        def __getitem__(self, place: Any) -> Any:
            part = list.__getitem__(self, place)
            read[id(self)] += len(part) if isinstance(place, slice) else 1
            return part

    rows = [Row(row) for row in policy_schedule("1f1b", 4, 64).actions]
    ones, zeros = (1,) * 4, (0,) * 4
    assert not simulate_events(rows, Timing(dict.fromkeys(Kind, ones), zeros, zeros)).missing
    assert max(read.values()) == 2 * 64


@pytest.mark.parametrize(
    ("rows", "done", "missing"),
    [
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], [1, 1], {0: "1I0", 1: "0F1"}),
        (["0F0 0W0 0I0", "1F0 1I0 1W0"], [1, 3], {0: "0I0"}),
        (["0B0 0F0", "1F0 1B0"], [0, 0], {0: "0F0", 1: "0F0"}),
        (["0F0 0F1 0I0 0I1", "1F0 1W0 1I0 1F1 1I1"], [2, 1], {0: "1I0", 1: "1I0"}),
        (["0F0 0B0", "1F0 1F0 1F1 1B0"], [1, 2], {0: "1I0", 1: "0F1"}),
    ],
)
def test_a_rank_that_is_stuck_says_what_it_waits_for(
    rows: list[str], done: list[int], missing: dict[int, str]
) -> None:
    played = simulate_events(written(rows, (0, 1), 2).actions, steady(2, forward=1, inputs=1, weights=1))
    assert [len(row) for row in played.ends] == done
    assert {rank: str(action) for rank, action in played.missing.items()} == missing


@st.composite
def paces(draw: st.DrawFn, stages: int) -> Timing:
    def numbers() -> list[int]:
        return draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))

    return Timing({kind: numbers() for kind in Kind}, numbers(), numbers())


@UNHURRIED
@given(legal_schedules(), st.data())
def test_every_action_starts_as_soon_as_its_rank_and_inputs_allow(
    made: Schedule, data: st.DataObject
) -> None:
    timing = data.draw(paces(made.stages))
    assert simulate_events(made.actions, timing) == EventTimes(ends_by_recursion(made, timing), {})


def ends_by_recursion(made: Schedule, timing: Timing) -> list[list[int]]:
    places = {
        action: (rank, place) for rank, row in enumerate(made.actions) for place, action in enumerate(row)
    }

    @cache
    def end(rank: int, place: int) -> int:
        stage, kind, microbatch = made.actions[rank][place]
        ready = [end(rank, place - 1) if place else 0]
        if kind is Kind.F and stage:
            ready.append(end_of(stage - 1, "F", microbatch) + timing.forward_hops[stage])
        if kind is Kind.W:
            ready.append(end_of(stage, "I", microbatch))
        if kind in (Kind.I, Kind.B):
            ready.append(end_of(stage, "F", microbatch))
            if stage + 1 < made.stages:
                ready.append(end_of(stage + 1, "IB", microbatch) + timing.backward_hops[stage])
        return max(ready) + timing.durations[kind][stage]

    def end_of(stage: int, kinds: str, microbatch: int) -> int:
        (found,) = (
            places.get(Action(stage, Kind(kind), microbatch))
            for kind in kinds
            if Action(stage, Kind(kind), microbatch) in places
        )
        return end(*found)

    return [[end(rank, place) for place in range(len(row))] for rank, row in enumerate(made.actions)]


@UNHURRIED
@given(legal_schedules(), st.data())
def test_actions_that_cannot_run_are_reported_and_the_others_run(made: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, made.ranks - 1))
    shuffled = with_row(made, rank, data.draw(st.permutations(made.actions[rank])))
    timing = data.draw(paces(made.stages))
    played = simulate_events(shuffled.actions, timing)
    counts = done_by_tokens(shuffled)
    assert [len(ends) for ends in played.ends] == counts
    assert {*played.missing} == {r for r, row in enumerate(shuffled.actions) if counts[r] < len(row)}


POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@st.composite
def problems(draw: Any) -> tuple[Schedule, Timing]:
    made = schedule(
        draw(st.sampled_from(POLICIES)), ranks=draw(st.integers(1, 4)), microbatches=draw(st.integers(1, 6))
    )
    times = st.lists(st.integers(0, 20), min_size=made.stages, max_size=made.stages)
    first, second, third = draw(times), draw(times), draw(times)
    whole = [one + other for one, other in zip(second, third, strict=True)]
    hops = draw(times)
    durations = {Kind.F: first, Kind.I: second, Kind.W: third, Kind.B: whole}
    return made, Timing(durations, [0, *hops[1:]], [*hops[1:], 0])


@given(problem=problems())
def test_without_a_speedup_actions_take_their_durations(problem: tuple[Schedule, Timing]) -> None:
    made, timing = problem
    found = simulate_shared(made.event_order, timing, 1.0)
    assert found.ends == made.event_order.ends(timing)


@given(problem=problems(), speedup=st.floats(1.0, 4.0))
def test_no_rank_is_faster_than_the_speedup_and_no_work_is_lost(
    problem: tuple[Schedule, Timing], speedup: float
) -> None:
    made, timing = problem
    alike = simulate_shared(made.event_order, timing, 1.0)
    found = simulate_shared(made.event_order, timing, speedup)
    whole = sum(alike.busy(rank) for rank in range(made.ranks))
    assert max(map(max, found.ends)) >= whole / made.ranks - 1e-6
    for ends, slowest in zip(found.ends, alike.ends, strict=True):
        assert slowest[-1] / speedup - 1e-6 <= ends[-1]


def test_two_ranks_that_take_turns_are_as_fast_as_one_rank_alone() -> None:
    made = schedule("1f1b", ranks=2, microbatches=1)
    four = [4, 4]
    timing = Timing({Kind.F: four, Kind.I: four, Kind.W: four, Kind.B: [8, 8]}, [0, 0], [0, 0])
    found = simulate_shared(made.event_order, timing, 3.0)
    assert found.starts == [[0, 8], [2, 4]]
    assert found.ends == [[2, 12], [4, 8]]


def test_three_of_four_ranks_share_what_the_fourth_leaves() -> None:
    made = schedule("gpipe", ranks=4, microbatches=3)
    ones = [12] * 4
    timing = Timing({Kind.F: ones, Kind.I: ones, Kind.W: ones, Kind.B: [24] * 4}, [0] * 4, [0] * 4)
    found = simulate_shared(made.event_order, timing, 2.0)
    assert found.ends[0][:3] == pytest.approx([6, 12, 21])  # one, two and three ranks at a time
