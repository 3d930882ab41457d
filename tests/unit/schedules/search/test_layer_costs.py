"""What stages cost, from what their layers do."""

from __future__ import annotations

from plait.schedules.costs import Costs
from plait.schedules.search.layer_costs import LayerCosts


def test_unmeasured_layer_costs_are_split_evenly_over_f_i_and_w() -> None:
    costs = LayerCosts.evenly([3, 6, 9])
    assert costs.F == costs.I == costs.W == (1, 2, 3)
    assert costs.total == (3, 6, 9)
    assert costs.of_stages((1, 2)) == Costs(F=(1, 5), I=(1, 5), W=(1, 5))


def test_costs_of_a_stage_are_the_sums_of_its_layers_by_kind() -> None:
    costs = LayerCosts(F=(1, 2, 3), I=(4, 5, 6), W=(0, 1, 0))
    assert costs.total == (5, 8, 9)
    assert costs.of_stages((2, 1)) == Costs(F=(3, 3), I=(9, 6), W=(1, 0))


def test_messages_cost_the_ranks_that_send_and_receive_them() -> None:
    costs = LayerCosts(F=(1, 2, 3), I=(4, 5, 6), W=(0, 1, 0), comm=9, message=0.5)
    assert costs.of_stages((2, 1)) == Costs(F=(3.5, 3.5), I=(9.5, 6.5), W=(1, 0), comm=9)
    assert costs.with_messages(2).comm == 0.01 * 22 / 2
    assert costs.with_messages(2).message == 0.0025 * 22 / 2


def test_cost_of_the_loss_moves_from_forward_and_weight_to_input_gradient() -> None:
    costs = LayerCosts.evenly([3, 6, 9]).in_input_gradient(-1, 6)
    assert costs == LayerCosts(F=(1, 2, 1), I=(1, 2, 7), W=(1, 2, 1))
    assert costs.in_input_gradient(0, 30) == LayerCosts(F=(0, 2, 1), I=(3, 2, 7), W=(0, 2, 1))
