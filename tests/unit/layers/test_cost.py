from __future__ import annotations

from torch import nn

from plait.layers.cost import layer_costs
from plait.layers.layer_sequence import sequence_of


class Dear(nn.Linear):
    def cost(self) -> float:
        return 7


def test_cost_is_the_elements_of_matrices_or_what_the_layer_says() -> None:
    layers = [
        nn.Linear(3, 4),  # the bias costs next to nothing
        nn.Embedding(100, 3),  # a look-up too
        nn.ReLU(),
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 5)]),
        Dear(30, 30),
    ]
    assert layer_costs(sequence_of(nn.Sequential(*layers)).layers) == [13.0, 1.0, 1.0, 15.0, 7.0]
