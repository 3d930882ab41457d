"""Which linears of a layer read the same tensor, from its run on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from plait.models import gpt2, llama
from plait.models.layers.joinable_linears import PartialOutputs, Readers, join_linears, recording_readers
from plait.models.layers.layer_sequence import sequence_of
from plait.models.layers.shape_inference import infer
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.find_module_hooks import call_hooks

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


def test_linears_that_share_an_input_are_listed_in_the_order_of_their_calls() -> None:
    (found,) = readers_of(nn.Sequential(Pair()), torch.zeros(3, 4))
    assert found == (Readers(("second", "first")),)


def test_linears_whose_outputs_must_be_separate_share_no_input() -> None:
    assert readers_of(nn.Sequential(Viewing(), Chain()), torch.zeros(3, 4)) == [(), ()]


def test_a_forward_without_gradients_finds_no_shared_inputs() -> None:
    with torch.no_grad():
        assert readers_of(nn.Sequential(Pair()), torch.zeros(3, 4)) == [()]


class Unlike(nn.Module):
    """Linears of one tensor: two that can be joined, and others whose calls are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        one, other, twice, without, checkpointed, backward, changed = self.linears
        found = one(x) + other(x) + twice(x) + twice(x)
        with torch.no_grad():
            found = found + without(x)
        found = found + checkpoint(checkpointed, x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(backward(x).sum(), x)
        x.data.add_(1)
        return found + gradient + changed(x.detach().add_(1))


def test_calls_that_are_apart_are_not_joined_and_no_hook_stays() -> None:
    layer, x = Unlike(), torch.ones(3, 4, requires_grad=True)
    with recording_readers(layer) as record:
        layer(x)
    assert record.readers == (Readers(("linears.0", "linears.1")),)
    parts = PartialOutputs(layer, record.readers)
    with parts.giving_parts():
        output = layer(x)
    assert torch.equal(output.detach() * 0, torch.zeros(3, 4))
    assert parts.readers == record.readers
    assert [*call_hooks(layer)] == [one for module in layer.modules() for one in call_hooks(module)] == []


def test_linears_that_follow_each_other_in_memory_are_joined() -> None:
    """Not those with a hook, a frozen bias, a bias beside others without, or a place elsewhere."""
    memory = torch.zeros(5 * 8 + 6 * 2)

    def linear(place: int, bias: int | None) -> nn.Linear:
        made = nn.Linear(4, 2, bias=bias is not None)
        made.weight.data = memory[8 * place : 8 * place + 8].view(2, 4)
        if made.bias is not None and bias is not None:
            made.bias.data = memory[40 + 2 * bias : 42 + 2 * bias]
        made.forward = made.forward  # type: ignore[method-assign]  # as where its weight gradient is deferred
        return made

    def joined(linears: list[nn.Linear]) -> list[tuple[list[int], int, list[int]]]:
        readers = [Readers(tuple(map(str, range(len(linears)))), frozenset(["1"]))]
        found = join_linears(nn.ModuleList(linears), readers, WeightGradientQueue())
        return [([linears.index(one) for one in each.linears], each.first, [*each.copied]) for each in found]

    assert joined([linear(1, 1), linear(0, 0), linear(2, 2)]) == [([1, 0, 2], 1, [0])]
    assert joined([linear(0, None), linear(1, None)]) == [([0, 1], 0, [1])]
    assert joined([linear(0, 0), linear(1, None)]) == []
    assert joined([linear(0, 0), linear(2, 1), linear(3, 2)]) == [([1, 2], 0, [0])]
    assert joined([linear(0, 1), linear(1, 0)]) == []
    frozen, hooked = linear(1, 1), linear(1, 1)
    frozen.bias.requires_grad_(False)
    hooked.register_forward_hook(lambda *_: None)
    assert joined([linear(0, 0), frozen]) == joined([linear(0, 0), hooked]) == []
