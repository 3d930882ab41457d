"""What a model and a plan cannot decide together, and when ranks share what follows from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from plait.engine.blueprint import build_blueprint, shared_blueprint
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.rules import Rules, column, row


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


RULES: Rules = {"0.0": column, "0.1": row}


def test_sequence_parallelism_without_a_rule_sequence_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        build_blueprint(model(), Plan(tp=2, sequence_parallel="keep"), RULES)
    assert str(caught.value) == (
        "plan.sequence_parallel is 'keep', but no layer has the rule sequence: give it to layers that work "
        "on each position by itself outside of their regions, or choose 'none'."
    )


def tied(model: nn.Sequential) -> nn.Sequential:
    model[0][1].weight = model[0][0].weight
    return model


def test_ranks_of_one_process_share_the_blueprint_of_equal_models() -> None:
    results: dict[Hashable, Any] = {}
    plan = Plan(tp=2, dp=2)
    first = shared_blueprint(model(), plan, RULES, results)
    assert shared_blueprint(model(), replace(plan), dict(RULES), results) is first
    assert all(parameter.is_meta for parameter in first.sequence.parameters.values())


@pytest.mark.parametrize(
    ("other", "plan", "rules"),
    [
        (model().double(), Plan(tp=2), RULES),
        (model().requires_grad_(False), Plan(tp=2), RULES),
        (tied(model()), Plan(tp=2), {"0.0": column, "0.1": column}),
        (nn.Sequential(*model()[0]), Plan(tp=2), {"0": column, "1": row}),
        (model(), Plan(tp=2, dp=2), RULES),
        (model(), Plan(tp=2), {**RULES, "0.1": replace(row, input_is_parallel=False)}),
        (model(), Plan(tp=2), {"0.0": replace(column, gather_output=True)}),
    ],
)
def test_another_model_plan_or_rule_has_a_blueprint_of_its_own(
    other: nn.Sequential, plan: Plan, rules: Rules
) -> None:
    results: dict[Hashable, Any] = {}
    first = shared_blueprint(model(), Plan(tp=2), RULES, results)
    assert shared_blueprint(other, plan, rules, results) is not first
