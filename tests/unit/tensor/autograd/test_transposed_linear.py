"""`Conv1D` of Hugging Face, a linear whose weight is transposed; and weights that stand in two modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_deferred_weight_gradients import assert_equal, backward, deferred, do
from torch import Tensor, nn
from torch.nn import functional

from parity.layers import Conv1D, TiedHead
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients, made_by_linear
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 5, 3), (0, 3)])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_a_transposed_linear_equals_its_own_forward(shape: tuple[int, ...], frozen: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    native = Conv1D(4, 3).double()
    for name, parameter in native.named_parameters():
        parameter.requires_grad_(name not in frozen)
    twin, queue = deferred(native)
    given = torch.randn(shape, dtype=torch.float64)
    gradient = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    assert torch.equal(twin(given), native(given))
    torch.testing.assert_close(
        backward(twin, given, gradient), backward(native, given, gradient), rtol=1e-14, atol=1e-14
    )
    assert len(queue.pending) == ("weight" not in frozen)
    do(queue)
    assert_equal(twin, native)


def test_the_weight_gradient_of_a_transposed_linear_is_deferred_and_the_bias_gradient_is_not() -> None:
    twin, queue = deferred(Conv1D(4, 3))
    weight, bias = torch.ones(3, 4), torch.ones(4)
    twin.weight.grad, twin.bias.grad = weight, bias
    given = torch.randn(5, 3)
    assert made_by_linear(twin(given))
    backward(twin, given, torch.ones(5, 4))
    assert weight.eq(1).all()
    assert bias.eq(6).all()
    do(queue)
    assert twin.weight.grad is weight
    assert twin.bias.grad is bias
    torch.testing.assert_close(weight, 1 + given.sum(0).unsqueeze(1).expand(3, 4))
    assert bias.eq(6).all()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 warns always
def test_the_weight_gradient_of_a_transposed_linear_is_added_without_a_temporary() -> None:
    """`addmm_` writes straight into a gradient that is seen transposed; a second matrix would be seen."""
    twin, queue = deferred(Conv1D(64, 32))
    backward(twin, torch.randn(8, 32), torch.randn(8, 64))
    with torch.profiler.profile(profile_memory=True) as profile:
        do(queue)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) < 32 * 64 * 4


def test_a_gradient_may_have_more_digits_than_its_transposed_weight() -> None:
    """256 + 1 is 256 in bfloat16."""
    twin, queue = deferred(Conv1D(3, 2).bfloat16())
    for parameter in twin.parameters():
        parameter.grad, parameter.grad_dtype = None, torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    for size in (256.0, 1.0):
        backward(twin, torch.ones(1, 2).bfloat16(), torch.full((1, 3), size, dtype=torch.bfloat16))
        do(queue)
    assert all(parameter.grad.eq(257).all() for parameter in twin.parameters())


class OtherConv1D(nn.Module):
    """Another class of that name."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight) + self.bias


OtherConv1D.__qualname__ = "Conv1D"


class Subclass(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def without_bias() -> nn.Module:
    module = Conv1D(4, 3)
    module.bias = None
    module.forward = lambda x: x @ module.weight
    return module


def with_a_third_parameter() -> nn.Module:
    module = Conv1D(4, 3)
    module.scale = nn.Parameter(torch.ones(()))
    return module


@pytest.mark.parametrize(
    "make", [lambda: OtherConv1D(4, 3), lambda: Subclass(4, 3), without_bias, with_a_third_parameter]
)
def test_other_classes_than_transformers_conv1d_are_not_deferred(make: Callable[[], nn.Module]) -> None:
    module, queue = make(), WeightGradientQueue()
    bound = vars(module).get("forward")
    defer_weight_gradients(module, queue)
    assert vars(module).get("forward") is bound
    module(torch.randn(5, 3)).sum().backward()
    assert queue.take() == []


def test_a_module_with_a_forward_of_its_own_is_left_alone() -> None:
    """Whoever put it there wants it called."""
    linear, queue = nn.Linear(3, 3), WeightGradientQueue()
    linear.forward = lambda input: functional.linear(input, 2 * linear.weight, linear.bias)
    given = torch.randn(2, 3)
    expected = linear(given)
    defer_weight_gradients(linear, queue)
    assert torch.equal(linear(given), expected)


class FunctionalHead(nn.Linear):
    """A head as many models write it: a subclass that multiplies by a table that it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight) / 2


def tied_linear() -> nn.Sequential:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.LayerNorm(4), head)


def tied_subclass() -> nn.Sequential:
    embedding, head = nn.Embedding(7, 4), FunctionalHead(4, 7, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.LayerNorm(4), head)


def tied_tensor() -> nn.Sequential:
    embedding = nn.Embedding(7, 4)
    return nn.Sequential(embedding, nn.LayerNorm(4), TiedHead(embedding))


def tied_transposed() -> nn.Sequential:
    """One square weight, as a table, a linear's and a transposed linear's."""
    embedding, transposed, head = nn.Embedding(4, 4), Conv1D(4, 4), nn.Linear(4, 4)
    transposed.weight = head.weight = embedding.weight
    return nn.Sequential(embedding, transposed, nn.Tanh(), head)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("make", "kept"), [(tied_linear, 2), (tied_subclass, 1), (tied_tensor, 1), (tied_transposed, 3)]
)
def test_a_tied_weight_gets_the_gradients_of_all_its_users(
    make: Callable[[], nn.Sequential], kept: int, late: bool
) -> None:
    """Whichever of them are deferred, and whether their work is done between two backwards or after both."""
    torch.manual_seed(0)
    native = make().double()
    twin, queue = deferred(native)
    for _ in range(2):
        tokens = torch.randint(4, (2, 3))
        gradient = torch.randn(native(tokens).shape, dtype=torch.float64)
        backward(native, tokens, gradient)
        backward(twin, tokens, gradient)
        assert len(queue.pending) % kept == 0
        if not late:
            do(queue)
    do(queue)
    assert_equal(twin, native)
