"""Limits of a search: lower bounds of lengths, and the guard of a memory limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import LINEAR, LOOP, TINY, V, problem_of, problems, shortest

from plait.schedules.costs import Costs
from plait.schedules.search.local_search import local_search
from plait.schedules.search.lower_bound import lower_bound
from plait.schedules.search.memory_guard import MemoryGuard, least_memory
from plait.schedules.search.problem import Problem, StageLayout

ALONE = tuple((layout, 1, microbatches) for layout in (LINEAR, LOOP) for microbatches in (2, 3))


def in_turn(problem: Problem, room: MemoryGuard) -> list[int]:
    """Of each lane what comes next, if everything that it needs is done."""
    tables, count = problem.tables, problem.microbatches
    due = [lane * count + number for lane, number in enumerate(room.done) if number < count]

    def is_done(operation: int) -> bool:
        return operation < 0 or operation % count < room.done[operation // count]

    return [one for one in due if is_done(tables.after[one]) and is_done(tables.needs[one])]


def admitted_after(problem: Problem, *done: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Stage, kind and micro-batch of all that a rank lets in, when so much is done."""
    room, count = MemoryGuard(problem), problem.microbatches
    for stage, kind, microbatch in done:
        operation = (3 * stage + kind) * count + microbatch
        assert operation in in_turn(problem, room)
        assert room.admits(operation)
        room.take(operation)
    admitted = [operation for operation in in_turn(problem, room) if room.admits(operation)]
    return [(operation // count // 3, operation // count % 3, operation % count) for operation in admitted]


def test_the_guard_delays_a_forward_at_the_memory_limit() -> None:
    problem = problem_of(LINEAR, 1, 3, limit=2)
    assert admitted_after(problem) == [(0, 0, 0)]
    assert admitted_after(problem, (0, 0, 0)) == [(0, 0, 1), (0, 1, 0)]
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1)) == [(0, 1, 0)]
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1), (0, 1, 0)) == [(0, 1, 1), (0, 2, 0)]
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 0)) == [(0, 0, 2), (0, 1, 1)]


def test_the_guard_refuses_a_forward_that_would_block_an_older_micro_batch() -> None:
    # Two chunks on one rank, each holds one unit, and there is room for two: with both for chunk 0, no
    # micro-batch would ever get through chunk 1.
    problem = problem_of(LOOP, 1, 3, limit=2)
    assert admitted_after(problem, (0, 0, 0)) == [(1, 0, 0)]
    problem = problem_of(LOOP, 1, 3, limit=3)
    assert admitted_after(problem, (0, 0, 0)) == [(0, 0, 1), (1, 0, 0)]
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1)) == [(1, 0, 0)]
    assert admitted_after(problem, (0, 0, 0), (1, 0, 0)) == [(0, 0, 1), (1, 1, 0)]


def test_the_guard_refuses_an_input_gradient_that_exceeds_the_memory_limit() -> None:
    problem = problem_of(LINEAR, 1, 2, Costs(until_I=1, until_W=2), limit=3)
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1)) == [(0, 1, 0)]
    assert admitted_after(problem, (0, 0, 0), (0, 0, 1), (0, 1, 0)) == [(0, 2, 0)]


def test_the_guard_counts_held_memory_and_undo_restores_it() -> None:
    problem = problem_of(LINEAR, 2, 2, Costs(until_I=3, until_W=1))
    room = MemoryGuard(problem)
    held = []
    for operation in (0, 6, 1, 8, 2):  # F0 of both ranks, F1 of rank 0, I0 of both
        room.take(operation)
        held.append((room.held[0], room.held[1], room.inside[0]))
    assert held == [(3, 0, 3), (3, 3, 3), (6, 3, 6), (6, 1, 6), (4, 1, 3)]
    for operation in (2, 8, 1, 6, 0):
        room.undo(operation)
    assert (room.held, room.inside, set(room.done)) == ([0, 0], [0, 0], {0})


@pytest.mark.parametrize(
    ("layout", "until_input", "until_weight", "least"),
    [
        (LINEAR, [5, 2], [3, 4], (5, 4)),
        (V, [1, 1, 1, 1], [1, 1, 1, 1], (2, 2)),
        (V, [1, 2, 3, 4], [0, 0, 0, 0], (5, 5)),
        (V, [1, 1, 1, 1], [4, 1, 3, 1], (4, 4)),  # rank 0 turns alone; rank 1 beside its first chunk
        (LOOP, [2, 0, 2, 0], [2, 0, 3, 1], (5, 1)),
    ],
)
def test_least_memory_of_small_pipelines_is_the_listed_one(
    layout: StageLayout, until_input: list[int], until_weight: list[int], least: tuple[int, int]
) -> None:
    problem = problem_of(layout, 2, 2, Costs(until_I=until_input, until_W=until_weight))
    assert (least_memory(problem, 0), least_memory(problem, 1)) == least


def test_least_memory_is_enough_where_one_chunks_memory_grows_late() -> None:
    problem = problem_of(LOOP, 1, 2, Costs(until_I=[1, 1], until_W=[2, 1]), limit=2)
    assert least_memory(problem, 0) == 2
    assert admitted_after(problem) == [(0, 0, 0)]
    assert admitted_after(problem, (0, 0, 0)) == [(1, 0, 0)]


@given(problems(), st.randoms(use_true_random=False))
def test_whatever_order_the_guard_admits_all_operations_can_finish(problem: Problem, rng: Random) -> None:
    room = MemoryGuard(problem)
    for _ in range(problem.size):
        choices = [operation for operation in in_turn(problem, room) if room.admits(operation)]
        room.take(rng.choice(choices))
        assert max(room.held) <= problem.limit
    assert room.held == room.inside == [0] * problem.ranks


@given(problems(ALONE, growing=False))
def test_the_guard_refuses_only_operations_after_which_not_all_can_finish(problem: Problem) -> None:
    room = MemoryGuard(problem)

    @cache
    def goes_on(done: tuple[int, ...]) -> bool:
        """Whether everything can be done from here on, by trying everything; and so from where it leads."""
        assert done == tuple(room.done)
        if room.held[0] > problem.limit:
            return False
        leads = {}
        for operation in in_turn(problem, room):
            admitted = room.admits(operation)
            room.take(operation)
            leads[operation] = (admitted, goes_on(tuple(room.done)))
            room.undo(operation)
        ends = not leads or any(possible for _, possible in leads.values())
        assert not ends or all(admitted == possible for admitted, possible in leads.values())
        return ends

    assert goes_on(tuple(room.done))


@given(problems(ALONE))
def test_least_memory_is_the_smallest_limit_with_a_complete_order(problem: Problem) -> None:
    least = least_memory(problem, 0)
    assert can_end(replace(problem, limit=least))
    assert least == 0 or not can_end(replace(problem, limit=least - 1))


def can_end(problem: Problem) -> bool:
    """Whether all can be done on a single rank within the limit, by trying everything."""
    room = MemoryGuard(problem)

    @cache
    def can_go_on(done: tuple[int, ...]) -> bool:
        assert done == tuple(room.done)
        choices = in_turn(problem, room)
        for operation in choices:
            room.take(operation)
            ends = room.held[0] <= problem.limit and can_go_on(tuple(room.done))
            room.undo(operation)
            if ends:
                return True
        return not choices

    return can_go_on(tuple(room.done))


WHOLE = Costs(2, 4, 6, comm=5)
"""Ticks of 1 with two chunks a rank."""


@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches", "costs", "bound"),
    [
        (LINEAR, 1, 5, Costs(1, 2, 4), 35),  # its work
        (LINEAR, 4, 1, Costs(1, 2, 4), 4 + 8 + 4),  # the way of one micro-batch, with the last W
        (LINEAR, 4, 1, Costs(1, 2, 4, comm=3), 4 + 8 + 4 + 6 * 3),
        (V, 2, 1, WHOLE, 4 + 8 + 3 + 4 * 5),  # no hop in the middle
        (LOOP, 2, 1, WHOLE, 4 + 8 + 3 + 6 * 5),
        (LINEAR, 4, 8, Costs(), 24 + 3),  # rank 3 starts last, and as long as it takes to drain it has W
        (LINEAR, 4, 8, Costs(2, 2, 1), 40 + 6),  # rank 3 starts at 6
        (LINEAR, 4, 8, Costs(1, 1, 0), 16 + 3 + 3),  # and there is nothing to do while it is drained
    ],
)
def test_the_lower_bound_of_known_pipelines_is_the_listed_one(
    layout: StageLayout, ranks: int, microbatches: int, costs: Costs, bound: int
) -> None:
    problem = problem_of(layout, ranks, microbatches, costs, limit=1000)
    assert problem.measure(lower_bound(problem)) == bound


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        (4, 24 + 3),
        (3, 24 + 4),  # rank 0 waits 7 for its first input gradient, and has room for 3 forwards until then
        (2, 8 * 9 / 2),  # there, a micro-batch takes its place for 9
        (1, 8 * 9),
    ],
)
def test_the_lower_bound_grows_as_the_memory_limit_falls(limit: int, bound: int) -> None:
    assert lower_bound(problem_of(LINEAR, 4, 8, limit=limit)) == bound


def test_the_lower_bound_of_a_span_does_not_count_late_starts() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=7, of_span=True)
    assert problem.measure(lower_bound(problem)) == 24


def test_the_lower_bound_with_instant_forwards_uses_their_memory_last() -> None:
    costs = Costs([0, 1], 0, 2, comm=1, until_I=[3, 3], until_W=[1, 1])
    problem = problem_of(V, 1, 2, costs, limit=7)
    assert shortest(problem) == lower_bound(problem) == 6


@given(problems(TINY))
def test_no_schedule_is_shorter_than_the_bound(problem: Problem) -> None:
    best = shortest(problem)
    assert best is not None
    assert problem.measure(lower_bound(problem)) <= best * problem.ticks.tick


@settings(max_examples=20)
@given(problems())
def test_no_found_schedule_is_shorter_than_the_lower_bound(problem: Problem) -> None:
    assert all(candidate.timed.length >= lower_bound(problem) for candidate in local_search([problem], 1))
