"""`redistribute` in a layer of one's own: the proof of the rules sees where it enters and leaves a region."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from plait.plan.layout import Layout, Shard
from plait.rules import vocabulary
from plait.tensor import redistribute

PLAN = plait.Plan(tp=2, precision="fp64")


class Apart(nn.Module):
    """x + scale · tanh(x); each rank of `tp` computes it for its part of the sequence."""

    def __init__(self, mesh: plait.Mesh | None, where_scaled: str) -> None:
        super().__init__()
        self.mesh, self.where_scaled = mesh, where_scaled
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Whole to whole."""
        if self.mesh is None:
            return x + x.tanh() * self.scale
        axes = {"tp": self.mesh.size("tp")}
        whole, cut = Layout(x.shape, axes), Layout(x.shape, axes, {"tp": Shard(1)})
        mine = redistribute(x, whole, cut, self.mesh).tanh()
        if self.where_scaled == "inside":
            mine = mine * self.scale
        if self.where_scaled == "never gathered":
            return mine
        back = redistribute(mine, cut, whole, self.mesh)
        return x + (back if self.where_scaled == "inside" else back * self.scale)


def model(mesh: plait.Mesh | None, where_scaled: str = "outside") -> nn.Sequential:
    torch.manual_seed(4)
    table, linear = nn.Embedding(6, 4, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
    return nn.Sequential(table, Apart(mesh, where_scaled), linear)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(10).view(2, 5)
    return tokens % 6, tokens % 5


def gradients(where_scaled: str) -> dict[str, Tensor]:
    mesh = plait.Mesh(PLAN)
    made = model(mesh, where_scaled)
    engine = plait.parallelize(made, PLAN, mesh, plait.cross_entropy, rules={"0": vocabulary})
    engine.forward_backward(*batch())
    return {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}


def test_layers_that_redistribute_have_the_gradients_of_one_device(thread_ranks: Any) -> None:
    alone = model(None)
    tokens, targets = batch()
    nn.functional.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten()).backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for rank, found in enumerate(thread_ranks.run(gradients, "outside", ranks=2)):
        table = wanted["0.weight"]
        assert table is not None
        for name, gradient in found.items():
            expected = table[3 * rank : 3 * rank + 3] if name == "0.weight" else wanted[name]
            torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-15)
        assert found.keys() == wanted.keys()


@pytest.mark.parametrize(
    ("where_scaled", "sentence"),
    [
        ("inside", "the whole parameter scale is used inside a region"),
        ("never gathered", "leaves the layer"),
    ],
)
def test_a_redistribute_that_leaves_one_ranks_part_is_refused(
    thread_ranks: Any, where_scaled: str, sentence: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(sentence)):
        thread_ranks.run(gradients, where_scaled, ranks=2)
