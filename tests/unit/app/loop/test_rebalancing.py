"""What slow ranks cost a simulated step, and the cut that wins most of it back."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from plait.app.loop.rebalancing import StepSimulation
from plait.schedules.search.schedule_by_policy import schedule
from plait.schedules.search.stage_cuts import LayerCosts

LAYERS = 24


def simulation(
    factors: list[float], policy: str = "1f1b", layers: int = LAYERS, **options: int
) -> StepSimulation:
    costs = LayerCosts.evenly([1.0 + (layer % 2) for layer in range(layers)]).with_messages(len(factors))
    made = schedule(policy, ranks=len(factors), microbatches=4 * len(factors), **options)
    return StepSimulation(costs, made, tuple(factors))


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("slow", range(4))
def test_a_new_cut_wins_back_most_of_what_a_rank_at_half_speed_costs(policy: str, slow: int) -> None:
    factors = [2.0 if rank == slow else 1.0 for rank in range(4)]
    step, now = simulation(factors, policy), (6, 6, 6, 6)
    cut = step.fastest_cut(now)
    lost = step.seconds(now) - step.seconds_without_slow_ranks(now)
    assert cut[slow] < 6
    assert sum(cut) == LAYERS
    assert step.seconds(now) - step.seconds(cut) >= 0.6 * lost


@pytest.mark.parametrize("factors", [(2.0, 1.0, 1.0), (1.0, 1.5, 1.0), (1.0, 2.0, 3.0)])
def test_no_other_cut_is_faster(factors: tuple[float, ...]) -> None:
    step = simulation([*factors], layers=9)
    every = [
        tuple(stop - start for start, stop in pairwise((0, *bounds, 9)))
        for bounds in combinations(range(1, 9), 2)
    ]
    found = step.seconds(step.fastest_cut((3, 3, 3)))
    assert found <= 1.02 * min(map(step.seconds, every))


def test_without_slow_ranks_the_cut_hardly_changes_and_one_stage_never_does() -> None:
    step = simulation([1.0, 1.0, 1.0, 1.0])
    assert step.seconds((6, 6, 6, 6)) == step.seconds_without_slow_ranks((6, 6, 6, 6))
    assert step.seconds(step.fastest_cut((6, 6, 6, 6))) >= 0.97 * step.seconds((6, 6, 6, 6))
    assert simulation([2.0]).fastest_cut((LAYERS,)) == (LAYERS,)


def test_a_slow_rank_with_two_stages_loses_layers_of_both() -> None:
    step = simulation([1.0, 2.0], "zb-v", layers=16)
    cut = step.fastest_cut((4, 4, 4, 4))
    of_rank = [sum(cut[stage] for stage in step.schedule.stages_of(rank)) for rank in range(2)]
    assert of_rank[1] < of_rank[0]
