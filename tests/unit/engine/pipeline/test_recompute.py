"""A layer that runs again for its backward: how often, how far, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from plait.engine.pipeline.recompute import RecomputingLayer, RecordOperations, recomputing
from plait.errors import ModelError
from plait.plan.plan import Recompute
from plait.tensor.attention import attention
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
PRODUCTS = ("mm", "addmm")


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def mlp() -> tuple[nn.Sequential, WeightGradientQueue]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).double()
    queue = WeightGradientQueue()
    defer_weight_gradients(module, queue)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module, queue


def there_and_back(
    run: Callable[[Tensor], Tensor], mode: Recompute, queue: WeightGradientQueue
) -> list[Tensor]:
    """The output and the gradient of the input; weight gradients are added to their buffers."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    output = recomputing(mode, run)(value)
    output.backward(torch.ones_like(output))
    for work in queue.take():
        work()
    assert value.grad is not None
    return [output.detach(), value.grad]


def test_recomputed_layers_have_the_bits_of_kept_ones() -> None:
    found = []
    for mode in MODES:
        module, queue = mlp()
        found.append([*there_and_back(module, mode, queue), *(p.grad for p in module.parameters())])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 1), ("full", 1)])
def test_a_recomputed_layer_runs_forward_once_more(mode: Recompute, again: int) -> None:
    module, queue = mlp()
    runs = []

    def run(value: Tensor) -> Tensor:
        runs.append(value)
        return module(value)

    there_and_back(run, mode, queue)
    assert len(runs) == 1 + again


@pytest.mark.parametrize(("mode", "products"), [("none", 2), ("selective", 2), ("full", 3)])
def test_products_are_kept_or_done_again_but_never_the_last(mode: Recompute, products: int) -> None:
    module, queue = mlp()
    with Products() as counted:
        there_and_back(module, mode, queue)
    assert counted.count == products + 2  # and the gradient of each linear's input


@pytest.mark.parametrize("mode", MODES)
def test_a_recomputed_forward_draws_the_random_numbers_of_the_first(mode: Recompute) -> None:
    def drop(value: Tensor) -> Tensor:
        return functional.dropout(value, 0.5) * value

    torch.manual_seed(3)
    output, gradient = there_and_back(drop, mode, WeightGradientQueue())
    after = torch.rand(())
    torch.manual_seed(3)
    expected = there_and_back(drop, "none", WeightGradientQueue())
    assert torch.equal(output, expected[0])
    assert torch.equal(gradient, expected[1])
    assert torch.equal(after, torch.rand(()))  # and nobody else's have moved


class Doubled(torch.autograd.Function):
    calls: list[str]

    @staticmethod
    def forward(ctx: Any, value: Tensor, calls: list[str]) -> Tensor:
        calls.append("forward")
        ctx.save_for_backward(value.clone())
        ctx.calls = calls
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.calls.append("backward")
        assert ctx.saved_tensors[0] is not None
        return gradient * 2, None


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_autograd_function_runs_backward_once_when_recomputed(mode: Recompute) -> None:
    calls: list[str] = []
    there_and_back(lambda value: Doubled.apply(value, calls), mode, WeightGradientQueue())  # type: ignore[no-untyped-call]
    assert calls == ["forward", "backward", *(["forward"] if mode != "none" else [])]


ROW = 64 * 4 * 8
"""The bytes of a tensor as wide as the input; the inner ones are four times as wide."""


def held(mode: Recompute) -> list[int]:
    """The bytes that stay until the backward, beside the input: of two micro-batches, one after the other."""
    module, queue = mlp()
    run = recomputing(mode, module)
    found = []
    for _ in range(2):
        with Live() as live:
            value = torch.ones(64, 4, dtype=torch.float64).requires_grad_()
            output = run(value)
            found.append(live.count() - 2 * ROW)  # the input, and what flows on
            output.backward(torch.ones_like(output))
            queue.take()
    return found


class Live(TorchDispatchMode):
    """Storages that operations gave and somebody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.found[id(storage)] = ref(storage)
        return result

    def count(self) -> int:
        return sum(size for size in self.sizes() if size > 1024)

    def sizes(self, *besides: Tensor) -> list[int]:
        """The bytes of each, but those of `besides`."""
        alive = [found() for found in self.found.values()]
        known = {tensor.data_ptr() for tensor in besides}
        return [one.nbytes() for one in alive if one is not None and one.data_ptr() not in known]


@pytest.mark.parametrize("mode", MODES)
def test_a_product_modified_in_place_is_recomputed_and_not_kept(mode: Recompute) -> None:
    weight = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def run(value: Tensor) -> Tensor:
        product = value @ weight
        product.mul_(3).add_(1)
        return (value @ product.transpose(1, 2)).sin().exp()

    for one, two in zip(
        there_and_back(run, mode, WeightGradientQueue()),
        there_and_back(run, "none", WeightGradientQueue()),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_each_recompute_mode_keeps_the_expected_bytes_until_the_backward() -> None:
    assert held("full") == [0, 0]
    assert held("selective") == [4 * ROW, 4 * ROW]  # the first product, not the last
    assert held("none") == [(1 + 4 + 4) * ROW] * 2  # the norm's and the activation's, too


def test_only_products_outside_plaits_linears_need_a_dispatch_mode() -> None:
    module, queue = mlp()
    layer = recomputing("selective", module)
    for _ in range(2):
        value = torch.ones(2, 4, dtype=torch.float64).requires_grad_()
        layer(value).sum().backward()
        queue.take()
    assert isinstance(layer, RecomputingLayer)
    assert (layer.most_results, layer.most_operations) == (1, 0)
    other = recomputing("selective", lambda value: (value @ value.transpose(-1, -2)).sin())
    other(value).sum().backward()
    assert isinstance(other, RecomputingLayer)
    assert (other.most_results, other.most_operations, other.sees_all) == (0, 1, True)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_saves_its_input_and_parameters_only_does_not_run_again(mode: Recompute) -> None:
    module, queue = nn.Linear(4, 4).double(), WeightGradientQueue()
    defer_weight_gradients(module, queue)
    weight, square = (nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in ((4,), (4, 4)))
    module.weight.grad, runs = torch.zeros_like(module.weight), []

    def run(value: Tensor) -> Tensor:
        runs.append(value)
        return (module(value) + value @ square).transpose(0, 1) + value.transpose(0, 1) * weight

    parameters = [*module.parameters(), weight, square]
    layer = recomputing(mode, run, parameters)
    value = torch.ones(2, 3, 4, dtype=torch.float64).requires_grad_()
    with Live() as live:
        output = layer(value)
        assert live.sizes(value, *parameters) == [output.nbytes], "the results of the products are not kept"
        del output
        assert live.sizes(value, *parameters) == []
        layer(value).sum().backward()
    assert len(runs) == 2, "one for each call"
    for work in queue.take():
        work()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 4
    assert module.weight.grad.tolist() == [[6.0] * 4] * 4
    if isinstance(layer, RecomputingLayer):
        assert (layer.most_results, layer.most_operations, layer.sees_all) == (0, 0, False)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_may_save_a_sparse_matrix(mode: Recompute) -> None:
    matrix = torch.eye(3, dtype=torch.float64).to_sparse()
    value = torch.ones(3, 2, dtype=torch.float64).requires_grad_()
    recomputing(mode, lambda value: torch.sparse.mm(matrix, value.exp()))(value).sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, value.detach().exp())


def test_a_saved_tensor_that_is_read_twice_is_computed_twice() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value * 2)
            return value * 3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    value = torch.ones(3, dtype=torch.float64).requires_grad_()
    recomputing("full", Twice.apply)(value).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [4.0] * 3


def test_a_layer_that_saves_less_when_it_runs_again_is_refused() -> None:
    runs: list[int] = []

    def run(value: Tensor) -> Tensor:
        runs.append(1)
        return value.sin().exp() if len(runs) == 1 else value * 2

    value = torch.ones(3, dtype=torch.float64).requires_grad_()
    with pytest.raises(
        ModelError, match=r"saved torch.float64 \[3\] for its backward, and nothing when it ran again"
    ):
        recomputing("full", run)(value).sum().backward()


def test_a_layer_that_computes_a_gradient_in_its_forward_can_be_recomputed() -> None:
    def run(value: Tensor) -> Tensor:
        inner = value.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(inner.sin().sum(), inner)
        return value * gradient

    for mode in MODES:
        _, gradient = there_and_back(run, mode, WeightGradientQueue())
        expected = there_and_back(run, "none", WeightGradientQueue())[1]
        assert torch.equal(gradient, expected)


def attentive(value: Tensor) -> Tensor:
    """Attention between operations that are computed again."""
    query = (value.sin() * 2).unsqueeze(1)
    return attention(query, query.cos(), query.exp()).sin()


def overwritten(value: Tensor) -> Tensor:
    """Attention whose result is written to."""
    query = value.sin().unsqueeze(1)
    with torch.no_grad():
        mixed = attention(query, query, query).mul_(3)
    return (query * mixed).sin()


class Attentions(Products):
    """Counts calls of fused attention; not its backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name.startswith("_scaled_dot_product") and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("run", "sees_all"), [(attentive, False), (overwritten, True)])
@pytest.mark.parametrize("mode", MODES)
def test_attention_is_kept_unless_it_is_written_to(
    run: Callable[[Tensor], Tensor], sees_all: bool, mode: Recompute
) -> None:
    layer = recomputing(mode, run)
    kept = mode == "none" or (mode == "selective" and run is attentive)
    for _ in range(2):
        value, alike = (torch.linspace(0, 1, 24).double().reshape(2, 3, 4).requires_grad_() for _ in range(2))
        with Attentions() as counted:
            layer(value).sum().backward()
        assert counted.count == (1 if kept else 2)
        run(alike).sum().backward()
        assert value.grad is not None
        assert alike.grad is not None
        assert torch.equal(value.grad, alike.grad)
        if mode == "selective":
            assert isinstance(layer, RecomputingLayer)
            assert (layer.most_operations, layer.sees_all) == (1, sees_all)


def test_operations_are_seen_in_attention_only_once_no_other_has_been_used() -> None:
    layer, value = recomputing("selective", attentive), torch.ones(2, 3, 4).requires_grad_()
    seen = []
    for _ in range(2):
        with patch.object(RecordOperations, "__torch_dispatch__", autospec=True) as record:
            record.side_effect = lambda mode, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
            layer(value)
        seen.append({call.args[1].overloadpacket.__name__ for call in record.call_args_list})
        layer(value).sum().backward()
    before, after = seen
    assert "sin" in before
    assert "sin" not in after
    assert any(name.startswith("_scaled_dot_product") for name in after)
