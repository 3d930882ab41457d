"""What a model and a plan cannot decide together."""

from __future__ import annotations

import pytest
from torch import nn

from plait.blueprint import build_blueprint
from plait.errors import PlanError
from plait.plan import Plan
from plait.rules import Rules, column, row


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


RULES: Rules = {"0.0": column, "0.1": row}


def test_pieces_of_the_sequence_without_a_rule() -> None:
    with pytest.raises(PlanError) as caught:
        build_blueprint(model(), Plan(tp=2, sequence_parallel="keep"), RULES)
    assert str(caught.value) == (
        "plan.sequence_parallel is 'keep', but no layer has the rule sequence: give it to layers that work "
        "on each position by itself outside of their regions, or choose 'none'."
    )
