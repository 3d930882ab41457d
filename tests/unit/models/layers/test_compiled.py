"""What was given to `torch.compile` is refused, what was kept from it is not; nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError, PlanError
from plait.plan.plan import Plan

compiled: Callable[[Any], Any] = torch.compile
"""Its first call imports the compiler, which takes a second: no class is compiled where a module is read."""


def by_method() -> nn.Module:
    class ByMethod(nn.Module):
        @compiled
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    return ByMethod()


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = compiled(torch.tanh)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.activation(hidden)
        return result


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def weave(model: nn.Module, loss: Any = plait.cross_entropy) -> None:
    plan = Plan()
    plait.parallelize(model, plan, plait.Mesh(plan), loss)


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: compiled(nn.Sequential(layer())), r"the model \(OptimizedModule\)"),
        (lambda: in_place(nn.Sequential(layer())), r"the model \(Sequential\)"),
        (lambda: nn.Sequential(layer(), compiled(layer())), r"1 \(OptimizedModule\)"),
        (lambda: nn.Sequential(layer(), in_place(layer())), r"1 \(Linear\)"),
        (lambda: nn.Sequential(nn.Sequential(layer(), in_place(layer()))), r"0\.1 \(Linear\)"),
        (lambda: nn.Sequential(nn.ModuleDict({"inner": compiled(layer())})), r"0\.inner \(OptimizedModule\)"),
        (lambda: nn.Sequential(layer(), by_method()), r"forward of 1 \(ByMethod\)"),
        (lambda: nn.Sequential(layer(), ByAttribute()), r"activation of 1 \(ByAttribute\)"),
    ],
)
def test_models_given_to_torch_compile_are_refused_by_name(make: Callable[[], nn.Module], place: str) -> None:
    with pytest.raises(
        ModelError, match=f"^{place} was given to torch.compile: plait keeps weight gradients"
    ):
        weave(make())


def test_losses_given_to_torch_compile_are_refused_by_name() -> None:
    class ByTotal:
        @compiled
        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return output.sum()

        def weight(self, targets: Tensor) -> Tensor:
            return torch.tensor(1.0)

    class ByModule(ByTotal):
        total = plait.tensor.losses.CrossEntropy.total  # type: ignore[assignment]

        def __init__(self) -> None:
            self.head = in_place(layer())

    with pytest.raises(PlanError, match=r"^total of the loss ByTotal was given to torch.compile: "):
        weave(nn.Sequential(layer()), ByTotal())
    with pytest.raises(ModelError, match=r"^head \(Linear\) was given to torch.compile: "):
        weave(nn.Sequential(layer()), ByModule())


def test_a_layer_with_torch_compiler_disable_is_accepted() -> None:
    class NeverCompiled(nn.Module):
        @torch.compiler.disable
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    weave(nn.Sequential(layer(), NeverCompiled()))
