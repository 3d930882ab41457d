"""Which linears of a layer read the same tensor, from its run on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.layers.layer_sequence import sequence_of
from plait.layers.shape_inference import infer
from plait.layers.shared_inputs import Readers
from plait.models import gpt2, llama

SIZES: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 16, "context": 8}


def readers_of(model: nn.Module, given: Tensor) -> list[tuple[Readers, ...]]:
    return [one.readers for one in infer(sequence_of(model).layers, given, input_gradients=False)]


def tokens() -> Tensor:
    return torch.zeros(2, 8, dtype=torch.int64, device="meta")


def test_query_key_and_value_read_one_tensor_and_all_are_kept() -> None:
    _, attention, mlp, _ = readers_of(gpt2(**SIZES), tokens())
    assert attention == (Readers(("key", "value", "query")),)
    assert mlp == ()


def test_a_value_that_is_kept_without_query_and_key_is_copied() -> None:
    """Of them a rotation keeps nothing: as parts of one tensor they would stay in memory with the value."""
    _, attention, mlp, _ = readers_of(llama(**SIZES), tokens())
    assert attention == (Readers(("key", "value", "query"), frozenset(["value"])),)
    assert mlp == (Readers(("gate", "up")),)


class Pair(nn.Module):
    """Two linears of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, device="meta") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) * self.first(x)


class Viewing(Pair):
    """A pair, of which one output is viewed in a shape that parts of a larger tensor do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x).view(-1).view(x.shape) * self.first(x)


class Chain(Pair):
    """One linear after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x)))


def test_they_are_listed_in_the_order_of_their_calls() -> None:
    (found,) = readers_of(nn.Sequential(Pair()), torch.zeros(3, 4))
    assert found == (Readers(("second", "first")),)


def test_a_layer_that_needs_whole_outputs_has_none() -> None:
    assert readers_of(nn.Sequential(Viewing(), Chain()), torch.zeros(3, 4)) == [(), ()]


def test_an_evaluation_has_none() -> None:
    with torch.no_grad():
        assert readers_of(nn.Sequential(Pair()), torch.zeros(3, 4)) == [()]
