"""Stages cut by what layers really take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.case import Case
from parity.cases import USER_CASES, gpt2, llama
from parity.pairs import in_quick
from parity.parity import check_parity
from plait.engine.blueprint import build_blueprint
from plait.estimate.measurement.measured_balance import balance, measured_costs
from plait.plan.plan import Plan


class Busy(nn.Module):
    """A linear that takes its time, and says nothing about it."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.linear = nn.Linear(64, 64)

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(self.rounds):
            value = self.linear(value).tanh()
        return value


def draw_vectors(rows: int, generator: torch.Generator) -> Any:
    return torch.randn(rows, 64, generator=generator), torch.randn(rows, 64, generator=generator)


def lopsided() -> nn.Sequential:
    return nn.Sequential(*(Busy(rounds) for rounds in (80, 1, 1, 1, 1, 1)))


class SquaredError:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


def balanced(plan: Plan) -> tuple[Plan, Plan]:
    mesh = plait.Mesh(plan)
    inputs, targets = draw_vectors(plan.microbatches * 32, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = lopsided()
    found = balance(model, plan, mesh, inputs, targets, SquaredError())
    engine = plait.parallelize(model, found, mesh, SquaredError())
    assert engine.forward_backward(inputs, targets).isfinite()
    return found, plan


@pytest.mark.parametrize("schedule", in_quick(("1f1b", "auto"), "1f1b"))
def test_a_layer_that_takes_long_gets_a_stage_for_itself(thread_ranks: Any, schedule: str) -> None:
    plan = Plan(pp=2, microbatches=4, schedule=schedule)
    assert build_blueprint(lopsided(), Plan(pp=2, microbatches=4)).layers_per_stage != (1, 5)
    (first, _), (second, _) = thread_ranks.run(balanced, plan, ranks=2)
    assert first == second  # although each rank has measured for itself
    assert first.layers_per_stage is not None
    assert first.layers_per_stage[0] == 1


def costs_in_a_rank(case: Case, plan: Plan) -> Any:
    mesh = plait.Mesh(plan)
    blueprint = build_blueprint(case.build(), plan)
    ((inputs, targets),) = case.batches(2, 1, torch.float32)
    return measured_costs(blueprint, mesh, inputs, targets, case.loss)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tp=2),
        Plan(tp=2, precision="bf16", recompute="full"),
        Plan(cp=2),
        Plan(cp=3, tp=2, context_parallel="ring", sequence_parallel="keep"),
    ],
    ids=["alone", "cut", "mixed", "contexts", "contexts-cut"],
)
def test_every_layer_of_every_rank_is_measured(thread_ranks: Any, plan: Plan) -> None:
    case = llama(layers=1)
    for costs in thread_ranks.run(costs_in_a_rank, case, plan, ranks=plan.world):
        assert len(costs.total) == woven.layer_count(case)
        assert all(cost > 0 for cost in costs.F)


@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.name)
def test_users_models_are_measured(case: Case) -> None:
    blueprint = build_blueprint(case.build(), Plan())
    ((inputs, targets),) = case.batches(2, 1, torch.float32)
    costs = measured_costs(blueprint, plait.Mesh(Plan()), inputs, targets, case.loss)
    assert len(costs.total) == woven.layer_count(case)


def test_a_balanced_plan_computes_the_same(thread_ranks: Any) -> None:
    case, plan = gpt2(layers=2), Plan(pp=2, schedule="zb-h1", microbatches=3, precision="fp64")
    found = thread_ranks.run(balanced_case, case, plan, ranks=2)[0]
    check_parity(thread_ranks, case, found)


def balanced_case(case: Case, plan: Plan) -> Plan:
    mesh = plait.Mesh(plan)
    ((inputs, targets),) = case.batches(woven.global_rows(plan), 1, torch.float64)
    return balance(case.build(), plan, mesh, inputs, targets, case.loss)
