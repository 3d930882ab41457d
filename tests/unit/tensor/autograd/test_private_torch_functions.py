"""What the direct calls of autograd's engine rely on: each does what torch's own function does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from plait.tensor.autograd.private_torch_functions import (
    apply_function,
    hidden_from_function_modes,
    reshaped_in_place,
    run_backward,
)
from plait.verification.reference.integer_mode import IntegerMode


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(input)
        return input * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return gradient * ctx.factor, None


def test_a_backward_adds_to_every_leaf_and_frees_the_graph() -> None:
    leaves = [torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2)]
    leaves[1].grad = torch.ones(2)
    roots = [leaves[0] * leaves[1], leaves[1].exp()]
    seeds = [torch.tensor([1.0, 10.0]), torch.zeros(2)]
    run_backward(roots, seeds)
    assert torch.equal(leaves[0].grad, seeds[0] * leaves[1])
    assert torch.equal(leaves[1].grad, 1 + seeds[0] * leaves[0])
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(roots, seeds)


def test_a_backward_begins_at_the_nodes_of_results_whose_memory_is_freed() -> None:
    """Also under a mode that sees the call."""
    for mode in (nullcontext(), IntegerMode()):
        leaf = torch.tensor([1.0, 2.0], requires_grad=True)
        with mode:
            run_backward([get_gradient_edge(3 * leaf)], [torch.tensor([1.0, 10.0])])
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [3.0, 30.0]


def test_a_seed_of_another_shape_is_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([leaf * 2], [torch.ones(3)])


def test_a_function_is_applied_with_its_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    output = apply_function(Double, leaf, 3.0)
    assert output.grad_fn.name() == "DoubleBackward"
    run_backward([output], [torch.ones(2)])
    assert leaf.grad.tolist() == [3.0, 3.0]


def test_a_transform_of_functorch_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda one: apply_function(Double, one, 3.0).sum())(torch.ones(2))


def test_a_tensor_in_another_shape_is_no_view_of_the_first() -> None:
    given = torch.arange(6.0)
    reshaped = reshaped_in_place(given, (2, 3))
    assert (reshaped.tolist(), reshaped._is_view()) == ([[0, 1, 2], [3, 4, 5]], False)
    assert reshaped.data_ptr() == given.data_ptr()


class Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(func)


def test_calls_are_hidden_from_function_modes() -> None:
    with Refusing():
        with pytest.raises(AssertionError):
            torch.ones(2)
        with hidden_from_function_modes():
            assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
