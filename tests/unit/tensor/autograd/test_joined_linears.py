"""Linears that read the same input, as one product: equal to apart, and apart where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from parity.kernels import Kernels
from parity.pairs import in_turns
from plait.plan.plan import Plan
from plait.tensor.autograd.joined_linears import are_side_by_side, side_by_side

WIDTH, MICROBATCHES = 16, 2


class ThreeReaders(nn.Module):
    """Three linears of one tensor, as attention has them, of unlike widths."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, 2 * WIDTH, bias)
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.output = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        key, value = self.key(normed), self.value(normed)
        return x + self.output(self.query(normed) * torch.cat([key.sigmoid(), value], -1))


class OneIsLeftOut(ThreeReaders):
    """The value is computed, and nobody reads it."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.value(normed)
        return x + self.output(self.query(normed) * self.key(normed).repeat(1, 2))


class WritesToOutputs(ThreeReaders):
    """Outputs are written to in place, which changes no other."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        key, value = self.key(normed).mul_(2), self.value(normed)
        return x + self.output(self.query(normed).add_(1) * torch.cat([key, value], -1))


class OneReadsAnotherTensor(ThreeReaders):
    """The query is computed from another tensor than key and value."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        key, value = self.key(normed), self.value(normed)
        return x + self.output(self.query(normed * 3) * torch.cat([key, value], -1))


class CallsOneTwice(ThreeReaders):
    """The key is computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.output(self.query(normed) * torch.cat([self.key(normed), self.key(normed)], -1))


class ViewsOutputs(ThreeReaders):
    """Rows and features of an output are merged by `view`, which a part of a larger tensor cannot be."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        key, value = (one(normed).view(-1).view(x.shape) for one in (self.key, self.value))
        return x + self.output(self.query(normed) * torch.cat([key, value], -1))


class WithoutGradient(ThreeReaders):
    """The key has no gradient, of a tensor of which the query has one."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, value = self.query(normed), self.value(normed)
        with torch.no_grad():
            key = self.key(normed)
        return x + self.output(query * torch.cat([key, value], -1))


class WithoutGradientOfSome(ThreeReaders):
    """The key has no gradient for some rows, which the meta device does not show."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, value = self.query(normed), self.value(normed)
        with torch.set_grad_enabled(x.is_meta):
            key = self.key(normed)
        return x + self.output(query * torch.cat([key, value], -1))


class CheckpointsItself(ThreeReaders):
    """Key and value are computed in checkpoints of their own, which count what each operation saves."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query = self.query(normed)
        both = [checkpoint(self._bent, one, normed, use_reentrant=False) for one in (self.key, self.value)]
        return x + self.output(query * torch.cat(both, -1))

    def _bent(self, linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x).tanh()


class BackwardWithin(ThreeReaders):
    """The key is an energy, whose gradient the layer takes by itself, and so a part of the graph ends."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, value = self.query(normed), self.value(normed)
        (force,) = torch.autograd.grad(self.key(normed).tanh().sum(), normed)
        return x + self.output(query * torch.cat([force, value], -1))


class GivesStrides(ThreeReaders):
    """Strides of an output by itself are given by the layer."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        key = self.key(normed).as_strided(x.shape, (WIDTH, 1))
        return x + self.output(self.query(normed) * torch.cat([key, self.value(normed)], -1))


class TiedWeights(ThreeReaders):
    """Key and value have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.value.weight = self.key.weight


def with_frozen_key() -> nn.Module:
    layer = ThreeReaders()
    layer.key.weight.requires_grad_(False)
    return layer


def with_half_the_biases() -> nn.Module:
    layer = ThreeReaders()
    layer.key = nn.Linear(WIDTH, WIDTH, bias=False)
    return layer


def with_a_hook() -> nn.Module:
    layer = ThreeReaders()
    layer.key.register_forward_hook(_doubled)
    return layer


def _doubled(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return output * 2


Make = Callable[[], nn.Module]


def gradients_of_plain_torch(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    for rows in batch.split(len(batch) // MICROBATCHES):
        (nn.functional.mse_loss(model(rows), rows) / MICROBATCHES).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def step(make: Make, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The gradients of a step in float64, and how often a product reads an input forward."""
    torch.manual_seed(0)
    plan = Plan(microbatches=MICROBATCHES, **options)
    model = nn.Sequential(make(), make()).double()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss)
    batch = torch.randn(4, WIDTH, dtype=torch.float64)
    engine.forward_backward(batch, batch)
    for parameter in engine.parameters():
        parameter.grad = None
    with Kernels() as kernels:  # of a second step, which runs nothing on the meta device
        engine.forward_backward(batch, batch)
    found = {name: one.grad.clone() for name, one in engine.named_parameters() if one.grad is not None}
    expected = gradients_of_plain_torch(model, batch)
    largest = max(one.abs().max().item() for one in expected.values())
    for name, one in expected.items():
        assert (found[name] - one).abs().max() <= 1e-12 * max(one.abs().max().item(), 1e-3 * largest), name
    return found, kernels.names["addmm"] + kernels.names["mm"]


def products(make: Make, **options: Any) -> float:
    """Products of matrices of a layer and micro-batch, forward and input gradients; gradients are checked."""
    _, count = plait.launch(step, make, options, ranks=1, ranks_as="threads")[0]
    return count / (2 * MICROBATCHES)


JOINED, APART = 4, 8
"""Two linears of one tensor each, and of four: forward, and backward for the input."""


@pytest.mark.parametrize("make", [ThreeReaders, OneIsLeftOut, WritesToOutputs])
def test_linears_that_read_one_tensor_are_one_product(make: Make) -> None:
    assert products(make) == JOINED


def test_joined_linears_without_biases_have_none_in_their_product() -> None:
    assert products(lambda: ThreeReaders(bias=False)) == JOINED


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_linears_that_read_one_tensor_are_one_product(recompute: str) -> None:
    """The last linear is not computed again, and with `selective` none is."""
    assert products(ThreeReaders, recompute=recompute) == JOINED + (recompute == "full")


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (OneReadsAnotherTensor, JOINED + 2),  # key and value read one tensor
        (CallsOneTwice, JOINED + 2),
        (ViewsOutputs, APART),
        (GivesStrides, APART),
        (TiedWeights, JOINED + 2),
        (with_frozen_key, APART),
        (with_half_the_biases, APART),
        (with_a_hook, APART),
    ],
)
def test_linears_that_differ_in_input_or_output_compute_their_own_products(make: Make, least: int) -> None:
    assert products(make) >= least


@pytest.mark.parametrize(
    ("make", "recompute"),
    in_turns(
        {
            make.__name__: make
            for make in (
                *(WithoutGradient, WithoutGradientOfSome, CheckpointsItself, BackwardWithin),
                GivesStrides,
            )
        },
        {"selective": "selective", "none": "none"},
    ),
)
def test_linears_whose_calls_autograd_treats_differently_are_not_joined(make: Make, recompute: str) -> None:
    """Each equals plain PyTorch; before, an output came from a product with other saved tensors."""
    products(make, recompute=recompute)


def test_lora_on_one_of_three_linears_leaves_them_separate_products() -> None:
    def make() -> nn.Module:
        return plait.lora(nn.Sequential(ThreeReaders()), rank=2, targets=["*query"])

    assert products(make) > APART - 2, (
        "frozen linears need no weight gradient, adapters are products of their own"
    )


def test_tensors_count_as_adjacent_only_without_a_gap_in_one_storage() -> None:
    flat = torch.arange(24.0)
    first, second, third = flat[:8].view(2, 4), flat[8:12].view(1, 4), flat[16:24].view(2, 4)
    joined = side_by_side([first, second])
    assert joined is not None
    assert torch.equal(joined, flat[:12].view(3, 4))
    joined[2] = 0
    assert not second.any(), "it is a view"
    assert not are_side_by_side([first, third]), "a gap"
    assert not are_side_by_side([second, first]), "another order"
    assert not are_side_by_side([first, second.clone()]), "another memory"
    assert not are_side_by_side([first, flat[8:12].view(2, 2)]), "other columns"
