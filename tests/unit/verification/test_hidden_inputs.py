"""A loss, or a layer, that depends on a tensor which it is not given is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from verification_cases import CLASSES, rows_and_classes

import plait
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.verification.reference.reference_layers import require_no_hidden_input
from plait.verification.report import VerificationReport


class Balanced(nn.Module):
    """A layer that gives an auxiliary loss to `keep`."""

    def __init__(self, keep: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(6, 6), keep

    def forward(self, x: Tensor) -> Tensor:
        weights = self.linear(x).softmax(-1)
        self.keep(weights.square().mean())
        return x * weights


class Summed:
    """Cross-entropy plus what `more` returns."""

    def __init__(self, more: Callable[[], Any]) -> None:
        self.more = more

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets, reduction="sum") + self.more()

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


def verified(keep: Callable[[Tensor], object], loss: Any) -> VerificationReport:
    model = nn.Sequential(Balanced(keep), nn.Linear(6, CLASSES))
    return plait.verify(model, Plan(microbatches=2), *rows_and_classes(), loss, ranks_as="threads")


KEPT: list[Tensor] = []


def keep(tensor: Tensor) -> None:
    KEPT.append(tensor)  # a function, and no method of the list, which copies of the layer would copy


def taken() -> Any:
    found = [tensor for tensor in KEPT if not tensor.is_meta]
    KEPT.clear()
    return sum(found)


def test_a_list_that_is_emptied_by_the_loss_is_seen_by_a_second_call() -> None:
    KEPT.clear()
    with pytest.raises(ModelError, match=r"called again .* depends on something else, as an auxiliary loss"):
        verified(keep, Summed(taken))


def test_the_last_of_the_layers_tensors_is_seen_in_the_graph() -> None:
    KEPT.clear()
    with pytest.raises(ModelError, match=r"the loss depends on a tensor \[6, 6\] that it is not given"):
        verified(keep, Summed(lambda: KEPT[-1]))


def test_a_loss_that_can_be_called_once_for_an_output_is_named() -> None:
    KEPT.clear()
    with pytest.raises(
        ModelError, match=r"called again with the same output and targets, fails with IndexError"
    ):
        verified(keep, Summed(lambda: KEPT.pop()))


def test_a_meta_tensor_left_by_a_trial_run_is_named() -> None:
    KEPT.clear()
    keep(torch.ones((), device="meta"))  # as the first run of a layer with these sizes does
    with pytest.raises(ModelError, match=r"meta device, left by a trial run of a layer"):
        verified(keep, Summed(lambda: KEPT[0]))


def test_a_layer_may_depend_on_its_arguments_and_its_parameters_only() -> None:
    given, weight, other = (torch.ones(3, requires_grad=True) for _ in range(3))
    entered = given * 1.0
    assert entered.grad_fn is not None
    require_no_hidden_input("1", {"a": entered * weight}, [entered.grad_fn], [weight])
    require_no_hidden_input("1", [torch.ones(3), entered], [entered.grad_fn], [])
    for result in (entered * other, (entered * weight, given.sin())):
        with pytest.raises(ModelError, match=r"1 depends on a tensor \[3\] .* no parameter of its own"):
            require_no_hidden_input("1", result, [entered.grad_fn], [weight])


def test_a_loss_with_fixed_weights_of_its_own_is_right() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)
            self.weights = nn.Parameter(weights, requires_grad=False)

        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(output * self.weights, targets, reduction="sum")

        def weight(self, targets: Tensor) -> Tensor:
            return torch.tensor(targets.numel())

    model = nn.Sequential(nn.Linear(6, CLASSES))
    assert plait.verify(model, Plan(microbatches=2), *rows_and_classes(), Weighted(), ranks_as="threads")
