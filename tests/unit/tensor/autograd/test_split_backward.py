"""The protocol of a split backward: what it gives alone, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.tensor.autograd import SplitBackward
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


class Product(nn.Module):
    """Of two inputs and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64))

    def split_forward(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return x * y * self.weight, (x, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.split_forward(x, y)[0]
        return result

    def input_gradient(self, gradient: Tensor, x: Tensor, y: Tensor) -> Any:
        return gradient * y * self.weight, gradient * x * self.weight

    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor, y: Tensor) -> Any:
        return {"weight": (gradient * x * y).sum(0)}


def deferred(module: nn.Module) -> tuple[nn.Module, WeightGradientQueue]:
    twin, queue = copy.deepcopy(module), WeightGradientQueue()
    defer_weight_gradients(twin, queue)
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return twin, queue


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    return x, y


def test_a_split_backward_defers_the_weight_gradient_and_not_the_inputs() -> None:
    plain, given, wanted = Product(), leaves(), leaves()
    assert isinstance(plain, SplitBackward)
    twin, queue = deferred(plain)
    plain(*wanted).sum().backward()
    twin(*given).sum().backward()
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-14) for a, b in zip(given, wanted, strict=True))
    assert not twin.weight.grad.any()
    queue.run()
    torch.testing.assert_close(twin.weight.grad, plain.weight.grad, rtol=1e-14, atol=0)


def test_without_gradients_or_with_keyword_arguments_the_plain_forward_runs() -> None:
    twin, queue = deferred(Product())
    x, y = leaves()
    with torch.no_grad():
        assert torch.equal(twin(x, y), twin(x, y=y))
    assert not queue.take()


def test_a_frozen_module_with_a_split_backward_defers_nothing() -> None:
    twin, queue = deferred(Product().requires_grad_(False))
    x, y = leaves()
    twin(x, y).sum().backward()
    assert x.grad is not None
    assert not queue.take()


def run(module: nn.Module) -> None:
    """Forward, and both parts of the backward."""
    twin, queue = deferred(module)
    twin(*leaves()).sum().backward()
    queue.run()


class NotStatic(Product):
    def weight_gradients(self, gradient: Tensor, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return {}


class SavesWeight(Product):
    def split_forward(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return x * y * self.weight, (x, self.weight[:2])


class SavesList(Product):
    def split_forward(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return x * y * self.weight, [x, y]


class OneInput(Product):
    def input_gradient(self, gradient: Tensor, x: Tensor, y: Tensor) -> Any:
        return (gradient,)


class Misshapen(Product):
    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor, y: Tensor) -> Any:
        return {"weight": gradient * x * y}


class Forgetful(Product):
    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor, y: Tensor) -> Any:
        return {}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (NotStatic, "NotStatic.weight_gradients is no static method"),
        (SavesWeight, "SavesWeight.split_forward saves a parameter, or a view of one"),
        (SavesList, "SavesList.split_forward gave Tensor and list"),
        (OneInput, "OneInput.input_gradient gave 1 gradients for 2 inputs"),
        (Misshapen, r"Misshapen.weight_gradients gave \[2, 3\] for the parameter 'weight' \[3\]"),
        (Forgetful, r"Forgetful.weight_gradients gave no gradient of the parameter 'weight' \[3\]"),
    ],
)
def test_malformed_split_backward_methods_are_refused(kind: type[Product], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        run(kind())


def test_a_second_backward_through_a_split_backward_is_refused() -> None:
    twin, _ = deferred(Product())
    output = twin(*leaves()).sum()
    output.backward(retain_graph=True)
    with pytest.raises(ModelError, match="Product met a second backward"):
        output.backward()
