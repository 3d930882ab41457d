from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import plait
from plait.estimate.memory.graph_pools import slots_of
from plait.plan.plan import Plan
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import LoweringSpec
from plait.schedules.search.schedule_by_policy import schedule

WIDTH, ROWS = 16, 3


def layers() -> nn.Sequential:
    """A linear keeps its input, and tanh its output."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def predicted(plan: Plan) -> list[plait.RankMemory]:
    """Of `ROWS` rows a micro-batch, in float32."""
    batch = torch.empty(ROWS * plan.microbatches, WIDTH, device="meta")
    ranks = plait.memory(layers(), plan, batch, batch, loss=nn.functional.mse_loss, device="cpu").ranks
    return list(ranks)


@pytest.mark.parametrize(
    ("policy", "ranks", "microbatches", "expected"),
    [
        ("gpipe", 1, 4, [{0: 4}]),
        ("1f1b", 1, 4, [{0: 1}]),
        ("1f1b", 2, 4, [{0: 2}, {1: 1}]),
        ("1f1b", 4, 2, [{0: 2}, {1: 2}, {2: 2}, {3: 1}]),
    ],
)
def test_a_stage_has_a_slot_for_each_micro_batch_in_flight(
    policy: str, ranks: int, microbatches: int, expected: list[dict[int, int]]
) -> None:
    programs = lower(schedule(policy, ranks=ranks, microbatches=microbatches), LoweringSpec((1,) * ranks, {}))
    assert [dict(slots_of(program)) for program in programs] == expected


def test_pools_stay_allocated_and_grow_with_the_slots() -> None:
    few, many = Plan(microbatches=4), Plan(microbatches=4, schedule="gpipe")
    ((one,), (four,)) = (predicted(replace(plan, cuda_graphs=True)) for plan in (few, many))
    ((eager,),) = (predicted(few),)
    pool = one.at_rest - eager.at_rest
    assert four.at_rest - eager.at_rest == 4 * pool
    layer_output = ROWS * WIDTH * 4
    assert pool >= 4 * layer_output  # what the four layers keep
    assert one.peak - one.at_rest <= eager.peak - eager.at_rest - pool + layer_output


def test_whole_parameters_and_gradients_stay_allocated_too() -> None:
    plan = Plan(dp=2, strategy="full", microbatches=2)
    for graphs, eager in zip(predicted(replace(plan, cuda_graphs=True)), predicted(plan), strict=True):
        matrices = 2 * WIDTH * WIDTH * 4
        assert graphs.at_rest - eager.at_rest >= 2 * matrices
