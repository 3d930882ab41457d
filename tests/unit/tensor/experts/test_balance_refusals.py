"""What the balance of experts refuses, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.tensor.experts.balance import Balance


class Sparse(nn.Module):
    """A mixture of some of the tokens."""

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.mixture, self.tokens = plait.MixtureOfExperts(4, 4, 3, 2), tokens

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixture(x[:, : self.tokens])
        return x + mixed.sum(1, keepdim=True)


def step(layers: tuple[nn.Module, ...]) -> None:
    plan, model = Plan(), nn.Sequential(*layers, nn.Linear(4, 5))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    engine.forward_backward(torch.randn(2, 6, 4), torch.randint(5, (2, 6)))


def refusal(*layers: nn.Module) -> str:
    with pytest.raises(ModelError) as caught:
        step(layers)
    return str(caught.value)


def test_a_router_that_is_given_some_of_the_tokens_is_refused(thread_ranks: Any) -> None:
    (said,) = thread_ranks.run(refusal, Sparse(4), ranks=1)
    assert said.startswith(
        "the router 0.mixture.router was given 8 tokens, but this rank has 6 positions of 2 rows"
    )


def test_routers_of_unlike_settings_are_refused(thread_ranks: Any) -> None:
    layers = Sparse(), Sparse()
    layers[1].mixture.router.balance = Balance(0.1)
    (said,) = thread_ranks.run(refusal, *layers, ranks=1)
    assert said.startswith("the routers 0.mixture.router and 1.mixture.router have unlike settings")


def test_a_router_of_two_layers_is_refused(thread_ranks: Any) -> None:
    layers = Sparse(), Sparse()
    layers[1].mixture.router = layers[0].mixture.router
    (said,) = thread_ranks.run(refusal, *layers, ranks=1)
    assert said.startswith("0.mixture.router and 1.mixture.router are one router")


def test_coupled_layers_of_unlike_numbers_of_experts_are_refused(thread_ranks: Any) -> None:
    layers = Sparse(), Sparse()
    layers[1].mixture = plait.MixtureOfExperts(4, 4, 2, 2)
    plait.tensor.balance_experts(nn.ModuleList(layers), weight=0.1, coupled=True)
    (said,) = thread_ranks.run(refusal, *layers, ranks=1)
    assert "coupled over layers with unlike numbers of experts" in said


def test_balance_experts_needs_routers_and_a_rate_needs_biases() -> None:
    with pytest.raises(ModelError, match="a model without routers"):
        plait.tensor.balance_experts(nn.Linear(2, 2), weight=0.1)
    with pytest.raises(ModelError, match="no router has a bias to correct"):
        plait.tensor.balance_experts(Sparse(), bias_rate=0.1)
