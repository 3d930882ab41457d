"""What slow ranks cost a simulated step, and the division of its work that wins most of it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import pytest

from parity.pairs import in_quick
from plait.app.loop.fastest_work_division import DivisionMemory, StepSimulation
from plait.app.loop.work_division import WorkDivision
from plait.schedules.costs import Costs, peak_memory
from plait.schedules.search.schedule_by_policy import schedule
from plait.schedules.search.stage_cuts import LayerCosts

LAYERS = 24


class Case(NamedTuple):
    """A simulation, and how the work of its steps is divided at first."""

    step: StepSimulation
    now: WorkDivision

    @property
    def lost(self) -> float:
        return self.step.seconds(self.now) - self.step.seconds_without_slow_ranks(self.now)

    def won(self, work: WorkDivision) -> float:
        return (self.step.seconds(self.now) - self.step.seconds(work)) / self.lost


def case(*replicas: list[float], policy: str = "1f1b", layers: int = LAYERS, rows: int = 1) -> Case:
    """Of replicas whose ranks take so many times as long, with as many layers in each stage."""
    ranks = len(replicas[0])
    costs = LayerCosts.evenly([1.0 + (layer % 2) for layer in range(layers)]).with_messages(ranks)
    order = schedule(policy, ranks=ranks, microbatches=4 * ranks)
    cut = (layers // order.stages,) * order.stages
    return Case(
        StepSimulation(costs, tuple(map(tuple, replicas))), WorkDivision(cut, order, (rows,) * len(replicas))
    )


def cuts_of(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All of them."""
    return [
        tuple(stop - start for start, stop in pairwise((0, *bounds, layers)))
        for bounds in combinations(range(1, layers), stages - 1)
    ]


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("slow", range(4))
def test_a_new_cut_wins_back_most_of_what_a_rank_at_half_speed_costs(policy: str, slow: int) -> None:
    one = case([2.0 if rank == slow else 1.0 for rank in range(4)], policy=policy)
    found = one.step.with_fastest_cut(one.now)
    assert found.cut[slow] < 6
    assert sum(found.cut) == LAYERS
    assert one.won(found) >= 0.6


@pytest.mark.parametrize("factors", [[2.0, 1.0, 1.0], [1.0, 1.5, 1.0], [1.0, 2.0, 3.0]])
def test_no_other_cut_is_faster(factors: list[float]) -> None:
    step, now = case(factors, layers=9)
    every = [step.seconds(WorkDivision(cut, now.order, now.rows)) for cut in cuts_of(9, 3)]
    assert step.seconds(step.with_fastest_cut(now)) <= 1.02 * min(every)


@pytest.mark.parametrize(("ranks", "least"), in_quick([(2, 0.66), (4, 0.85)], (4, 0.85)))
def test_with_another_order_more_is_won_back_and_no_rank_holds_more(ranks: int, least: float) -> None:
    """Of two ranks by a named order, of four by one that is searched."""
    one = case([1.0] * (ranks - 1) + [2.0])
    limit = float(max(peak_memory(one.now.order)))
    cut = one.step.fastest(one.now, moves_rows=False)
    both = one.step.fastest(one.now, moves_rows=False, memory_limit=limit)
    assert cut.order == one.now.order
    assert one.won(both) >= max(least, one.won(cut) + 0.03)
    assert max(peak_memory(both.order)) <= limit


def test_without_slow_ranks_the_cut_hardly_changes_and_one_stage_never_does() -> None:
    step, now = case([1.0] * 4)
    assert step.seconds(now) == step.seconds_without_slow_ranks(now)
    assert step.seconds(step.with_fastest_cut(now)) >= 0.97 * step.seconds(now)
    step, now = case([2.0])
    assert step.fastest(now, moves_rows=False, memory_limit=1.0) == now


def test_a_slow_rank_with_two_stages_loses_layers_of_both() -> None:
    step, now = case([1.0, 2.0], policy="zb-v", layers=16)
    found = step.with_fastest_cut(now)
    of_rank = [sum(found.cut[stage] for stage in now.order.stages_of(rank)) for rank in range(2)]
    assert of_rank[1] < of_rank[0]


@pytest.mark.parametrize(
    "factors", [(1.0, 2.0), (1.0, 1.1, 3.0), pytest.param((2.0, 1.0, 1.0, 1.4), marks=pytest.mark.full)]
)
def test_rows_are_shared_so_that_no_other_shares_are_faster(factors: tuple[float, ...]) -> None:
    replicas = len(factors)
    step, now = case(*([one] for one in factors), rows=9)
    found = step.fastest(now, moves_rows=True)
    every = [rows for rows in cuts_of(9 * replicas, replicas) if min(rows) >= now.order.microbatches]
    assert step.seconds(found) == min(step.seconds(WorkDivision(now.cut, now.order, rows)) for rows in every)
    assert sum(found.rows) == 9 * replicas


def test_of_many_pipelines_the_one_with_a_slow_rank_gets_fewer_rows_and_all_keep_their_cut() -> None:
    one = case([1.0, 2.0], *[[1.0, 1.0]] * 3, rows=16)
    found = one.step.fastest(one.now, moves_rows=True)
    assert found.rows[0] < 16 < min(found.rows[1:])
    assert one.won(found) >= 0.75
    assert one.won(one.step.fastest(one.now, moves_rows=False)) < 0.7
    assert one.step.fastest(one.now, moves_rows=False).rows == one.now.rows


def test_rows_go_back_when_no_rank_is_slow() -> None:
    step, now = case([1.0], [1.0], rows=8)
    uneven = WorkDivision(now.cut, now.order, (11, 5))
    assert step.fastest(uneven, moves_rows=True) == now


def bytes_of_activations(each: Sequence[float]) -> Callable[[WorkDivision], float]:
    """Return the activation memory of the rank with most, given that of each layer for a micro-batch."""

    def most(work: WorkDivision) -> float:
        bounds = pairwise((0, *accumulate(work.cut)))
        of_stages = [sum(each[start:stop]) for start, stop in bounds]
        costs = Costs(until_I=of_stages, until_W=of_stages)
        return float(max(peak_memory(work.order, costs.memory(work.order.ranks, work.order.stages))))

    return most


def test_with_unlike_layers_another_order_holds_no_more_bytes_than_that_of_before() -> None:
    """Within as many micro-batches it would: those of the last stage are ten times as large."""
    one = case([1.0, 1.0, 1.0, 2.0])
    limit = float(max(peak_memory(one.now.order)))
    bytes_of = bytes_of_activations([1.0] * 18 + [10.0] * 6)
    before = one.step.fastest(one.now, moves_rows=False)
    free = one.step.fastest(one.now, moves_rows=False, memory_limit=limit)
    bound = one.step.fastest(one.now, moves_rows=False, memory_limit=limit, memory=DivisionMemory(bytes_of))
    assert bytes_of(free) > bytes_of(before)
    assert bytes_of(bound) <= bytes_of(before)
    assert one.step.seconds(bound) <= one.step.seconds(before)


def test_no_work_is_moved_to_a_rank_beyond_the_limit_of_its_memory() -> None:
    one = case([1.0, 2.0])
    bytes_of = bytes_of_activations([1.0] * LAYERS)
    for limit, moves in ((bytes_of(one.now), False), (2 * bytes_of(one.now), True)):
        memory = DivisionMemory(bytes_of, limit)
        found = one.step.fastest(one.now, moves_rows=False, memory_limit=8.0, memory=memory)
        assert (found.cut != one.now.cut) == moves
        assert bytes_of(found) <= limit
