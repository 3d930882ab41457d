from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import DataError, ModelError
from plait.ranks.accelerator import multiplies_into_float32
from plait.tensor.autograd import deferred_weight_gradients
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients, linear
from plait.tensor.autograd.weight_gradient_queue import INPUT_ONLY, WEIGHTS_NEXT, WeightGradientQueue


def deferred(module: nn.Module) -> tuple[nn.Module, WeightGradientQueue]:
    """A copy of `module` that defers, its gradients zero."""
    twin, queue = copy.deepcopy(module), WeightGradientQueue()
    defer_weight_gradients(twin, queue)
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return twin, queue


def backward(module: nn.Module, given: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of the input."""
    leaf = given.detach().requires_grad_(given.is_floating_point())
    torch.autograd.backward(module(leaf), gradient)
    return leaf.grad


def do(queue: WeightGradientQueue) -> None:
    with torch.no_grad():
        for work in queue.take():
            work()


def assert_equal(got: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
        if other.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=1e-14, msg=name)
        else:
            assert one.grad is None


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 5, 3), (0, 3)])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_with_a_deferred_weight_gradient_equals_nn_linear(
    shape: tuple[int, ...], frozen: tuple[str, ...], bias: bool
) -> None:
    torch.manual_seed(0)
    native = nn.Linear(3, 4, bias=bias, dtype=torch.float64)
    for name, parameter in native.named_parameters():
        parameter.requires_grad_(name not in frozen)
    twin, queue = deferred(native)
    given = torch.randn(shape, dtype=torch.float64)
    gradient = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    torch.testing.assert_close(
        backward(twin, given, gradient), backward(native, given, gradient), rtol=1e-14, atol=1e-14
    )
    do(queue)
    assert_equal(twin, native)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("tokens", [[[0, 2, 2], [5, 2, 0]], [1], []])
def test_an_embedding_with_a_deferred_weight_gradient_equals_nn_embedding(
    tokens: list[int], padding: int | None
) -> None:
    native = nn.Embedding(6, 4, padding_idx=padding, dtype=torch.float64)
    twin, queue = deferred(native)
    given = torch.tensor(tokens, dtype=torch.int64)
    gradient = torch.randn(*given.shape, 4, dtype=torch.float64)
    backward(native, given, gradient)
    backward(twin, given, gradient)
    do(queue)
    assert_equal(twin, native)


def test_deferred_gradients_of_linear_and_embedding_equal_torchs_over_several_backwards() -> None:
    native = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 7)
    ).double()
    twin, queue = deferred(native)
    for _ in range(3):
        given, gradient = torch.randint(7, (2, 3)), torch.randn(2, 3, 7, dtype=torch.float64)
        backward(native, given, gradient)
        backward(twin, given, gradient)
    assert len(queue.pending) == 9
    do(queue)
    assert_equal(twin, native)
    assert queue.take() == []


def test_a_weight_used_twice_gets_both_gradients() -> None:
    native = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh())
    native.append(native[0])
    twin, queue = deferred(native)
    given, gradient = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    backward(native, given, gradient)
    backward(twin, given, gradient)
    do(queue)
    assert_equal(twin, native)


def test_a_deferred_weight_gradient_is_added_in_place_when_the_queue_runs() -> None:
    twin, queue = deferred(nn.Linear(3, 4))
    place = torch.ones(4, 3)
    twin.weight.grad = place
    given = torch.randn(5, 3)
    backward(twin, given, torch.ones(5, 4))
    assert torch.equal(place, torch.ones(4, 3))
    do(queue)
    assert twin.weight.grad is place
    torch.testing.assert_close(place, 1 + given.sum(0).expand(4, 3))


def test_a_gradient_may_be_added_to_a_buffer_instead_of_grad() -> None:
    """What goes to a buffer of its own is added there, and `.grad` is left to autograd (biases, norms)."""
    native = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    twin, queue = deferred(native)
    tokens, gradient = torch.tensor([1, 4, 1]), torch.randn(3, 2, dtype=torch.float64)
    backward(native, tokens, gradient)
    buffers = {name: torch.ones_like(parameter) for name, parameter in twin.named_parameters()}
    for name, parameter in twin.named_parameters():
        queue.buffers[id(parameter)], parameter.grad = buffers[name], None
    backward(twin, tokens, gradient)
    do(queue)
    for name, wanted in native.named_parameters():
        kept = name in ("0.weight", "2.weight")
        assert (twin.get_parameter(name).grad is None) == kept
        got = buffers[name] - 1 if kept else twin.get_parameter(name).grad
        torch.testing.assert_close(got, wanted.grad, rtol=1e-14, atol=1e-14)


def test_deferred_work_looks_up_its_gradient_buffer_when_it_runs() -> None:
    """So work that was left for later finds `.grad`, whatever was set aside while the backward ran."""
    twin, queue = deferred(nn.Linear(3, 2, bias=False))
    place, aside = twin.weight.grad, torch.zeros(2, 3)
    assert queue.buffer_of(twin.weight) is place
    queue.buffers[id(twin.weight)] = aside
    assert queue.buffer_of(twin.weight) is aside
    backward(twin, torch.ones(1, 3), torch.ones(1, 2))
    queue.buffers.clear()
    do(queue)
    assert place.eq(1).all()
    assert not aside.any()


def test_asking_for_the_buffer_of_a_parameter_without_grad_fails() -> None:
    with pytest.raises(AssertionError, match="is set before a backward"):
        WeightGradientQueue().buffer_of(nn.Parameter(torch.ones(1)))


def test_a_forward_without_gradients_defers_nothing() -> None:
    native = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    twin, queue = deferred(native)
    tokens = torch.tensor([[1, 4]])
    with torch.no_grad():
        assert torch.equal(twin(tokens), native(tokens))
    assert queue.take() == []


def test_frozen_weights_defer_no_gradient() -> None:
    twin, queue = deferred(nn.Linear(3, 2).requires_grad_(False))
    assert backward(twin, torch.randn(4, 3), torch.ones(4, 2)) is not None
    assert queue.take() == []


def test_queued_work_runs_once_in_the_order_of_the_backward() -> None:
    queue, done = WeightGradientQueue(), list[str]()
    for name in ("first", "second"):
        queue.add(partial(done.append, name))
    queue.run()
    assert (done, queue.take()) == (["first", "second"], [])
    queue.run()
    assert done == ["first", "second"]


def test_work_run_during_the_backward_adds_the_gradients_of_the_native_module() -> None:
    native = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    twin, queue = deferred(native)
    for _ in range(2):
        given, gradient = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        backward(native, given, gradient)
        backward(twin, given, gradient)
        queue.run()
    assert_equal(twin, native)


def test_the_queue_overlaps_work_only_where_overlap_is_allowed() -> None:
    queue, done = WeightGradientQueue(), list[str]()
    queue.add(partial(done.append, "work"))
    queue.overlap()
    assert done == []
    queue.mode = WEIGHTS_NEXT
    queue.overlap()
    assert done == ["work"]
    queue.mode = INPUT_ONLY
    queue.add(partial(done.append, "later"))
    queue.overlap()
    assert done == ["work"]
    assert len(queue.take()) == 1


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.full), False])
def test_deferred_weight_gradients_hold_the_input_until_they_run(frozen: bool) -> None:
    linear = nn.Linear(3, 2)
    linear.weight.requires_grad_(not frozen)
    twin, queue = deferred(linear)
    memory = np.ones((4, 3), dtype=np.float32)  # a tensor on it keeps it alive, whoever holds a view
    held = weakref.ref(memory)
    twin(torch.from_numpy(memory)).sum().backward()
    del memory
    assert (held() is not None) == (not frozen)
    do(queue)
    assert held() is None


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "module",
    [Scaled(3, 2), nn.Embedding(4, 2, max_norm=1.0), nn.Embedding(4, 2, scale_grad_by_freq=True)],
    ids=["subclass", "max_norm", "scale_grad_by_freq"],
)
def test_subclasses_and_embeddings_with_options_are_not_deferred(module: nn.Module) -> None:
    twin, queue = deferred(module)
    given = torch.tensor([1, 1, 2]) if isinstance(module, nn.Embedding) else torch.randn(5, 3)
    gradient = torch.ones(*module(given).shape)
    backward(module, given, gradient)
    backward(twin, given, gradient)
    assert queue.take() == []
    assert_equal(twin, module)


def test_deferring_changes_the_given_instances_only() -> None:
    native = nn.Linear(3, 2)
    deferred(native)
    assert "forward" not in vars(native)


@pytest.mark.parametrize(
    ("module", "given", "name"),
    [
        (nn.Linear(3, 2), torch.ones(4, 3), "a linear"),
        (nn.Embedding(3, 2), torch.tensor([1, 2]), "an embedding"),
    ],
)
def test_a_second_backward_is_refused(module: nn.Module, given: Tensor, name: str) -> None:
    twin, queue = deferred(module)
    output = twin(given).sum()
    output.backward(retain_graph=True)
    with pytest.raises(ModelError, match=f"{name} met a second backward"):
        output.backward()
    assert len(queue.take()) == 1


def test_a_backward_that_makes_a_graph_is_refused() -> None:
    # A gradient penalty would otherwise lose its share of the weight's gradient without a word.
    twin, queue = deferred(nn.Linear(3, 2))
    given = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(ModelError, match="or one with create_graph"):
        torch.autograd.grad(twin(given).sum(), given, create_graph=True)
    assert queue.take() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_weight_gradients_in_fp32_and_bf16_equal_torchs(dtype: torch.dtype) -> None:
    native = nn.Linear(8, 4, dtype=dtype)
    twin, queue = deferred(native)
    given, gradient = torch.randn(5, 8, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    backward(native, given, gradient)
    backward(twin, given, gradient)
    do(queue)
    torch.testing.assert_close(twin.weight.grad, native.weight.grad)
    assert twin.weight.grad.dtype == dtype


@pytest.mark.parametrize(
    ("module", "given"),
    [(nn.Linear(2, 3), torch.ones(1, 2)), (nn.Embedding(3, 3), torch.tensor([1]))],
    ids=["linear", "embedding"],
)
def test_a_gradient_may_have_more_digits_than_its_weight(module: nn.Module, given: Tensor) -> None:
    """256 + 1 is 256 in bfloat16."""
    twin, queue = deferred(module.bfloat16())
    for parameter in twin.parameters():
        parameter.grad, parameter.grad_dtype = None, torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    given = given.bfloat16() if given.is_floating_point() else given
    for size in (256.0, 1.0):
        backward(twin, given, torch.full((1, 3), size, dtype=torch.bfloat16))
        do(queue)
    for parameter in twin.parameters():
        assert parameter.grad.dtype == torch.float32
        assert set(parameter.grad.flatten().tolist()) <= {0.0, 257.0}
        assert parameter.grad.any()


class WideProducts(TorchDispatchMode):
    """Computes `aten.addmm.dtype_out`, which CPUs do not have, as GPUs do; counts all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.found.append(func)
        if func is torch.ops.aten.addmm.dtype_out:
            (total, a, b, dtype), out = args, (kwargs or {})["out"]
            assert (total.dtype, dtype) == (torch.float32, torch.float32)
            assert a.dtype == b.dtype
            assert total.data_ptr() == out.data_ptr()
            assert total.stride() == out.stride()
            product = a.float() @ b.float()
            return out.copy_(product if (kwargs or {}).get("beta") == 0 else total + product)
        return func(*args, **(kwargs or {}))


def add_product_of_halves(
    *, transposed: bool, first: bool = False
) -> tuple[list[Any], Tensor, Tensor, Tensor]:
    """Add a linear's weight gradient in bfloat16 to ones in float32, or write it over NaN if it is the first.

    Returns the operations, the sum as `[out, in]`, and the gradient and the input of the linear.
    """
    given, gradient = torch.randn(7, 4).bfloat16(), torch.randn(7, 3).bfloat16()
    shape = (4, 3) if transposed else (3, 4)
    weight, queue = nn.Parameter(torch.randn(shape).bfloat16()), WeightGradientQueue()
    queue.buffers[id(weight)] = total = torch.full(shape, torch.nan if first else 1.0)
    queue.unwritten = {id(weight)} if first else set()
    leaf = given.detach().requires_grad_()
    linear(leaf, weight, None, queue, transposed=transposed).backward(gradient)
    with WideProducts() as products:
        do(queue)
    return products.found, total.t() if transposed else total, gradient, given


@pytest.mark.parametrize("transposed", [False, True])
def test_on_an_accelerator_the_product_is_added_without_a_temporary(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    """In one operation of torch's, and to the digits of the sum."""
    monkeypatch.setattr(deferred_weight_gradients, "multiplies_into_float32", lambda *_: True)
    for before in (1, 0):
        found, total, gradient, given = add_product_of_halves(transposed=transposed, first=not before)
        assert found == [torch.ops.aten.addmm.dtype_out]
        torch.testing.assert_close(total, before + gradient.float().t() @ given.float())


def test_a_cpu_adds_a_rounded_product() -> None:
    """The bits of a run there stay what they were."""
    found, total, gradient, given = add_product_of_halves(transposed=False)
    assert found == [torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor]
    assert torch.equal(total, 1 + (gradient.t() @ given).float())
    found, total, gradient, given = add_product_of_halves(transposed=False, first=True)
    assert found == [torch.ops.aten.mm.default, torch.ops.aten.copy_.default]
    assert torch.equal(total, (gradient.t() @ given).float())


def test_the_first_gradient_of_a_step_is_written_and_others_are_added_to_zeros() -> None:
    """Also of no rows, whose product is zero."""
    twin, queue = deferred(nn.Sequential(nn.Linear(3, 2), nn.Embedding(5, 3)))
    weight, (one, other) = twin[0].weight, [nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert queue.products == {id(weight)}, "an embedding adds rows"
    for rows, size in ((0, 0.0), (4, 4.0)):
        weight.grad.fill_(torch.nan)
        queue.unwritten = {id(weight)}
        for times in (1, 2):
            backward(twin[0], torch.ones(rows, 3), torch.ones(rows, 2))
            do(queue)
            assert weight.grad.eq(times * size).all()
    for parameter in (weight, one, other):
        parameter.grad = torch.full_like(parameter, torch.nan)
    queue.unwritten = {id(weight), id(one)}
    assert queue.begins((weight,))
    assert queue.unwritten == {id(one)}
    assert not queue.begins((weight, one)), "what is there of the weight stays, so zeros are needed"
    assert (weight.grad.isnan().all(), one.grad.any(), queue.unwritten) == (True, False, set())
    queue.unwritten = {id(one), id(other)}
    one.grad.fill_(torch.nan)
    assert not queue.buffer_of(one).any()
    assert queue.begins((other,))
    assert other.grad.isnan().all()


def test_torch_adds_products_in_a_wider_dtype() -> None:
    """The overload that `add_product` relies on; only CUDA has a kernel for it."""
    arguments = torch.ops.aten.addmm.dtype_out._schema.arguments
    assert [one.name for one in arguments] == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_adds_products_without_a_temporary() -> None:
    if not multiplies_into_float32(torch.device("cuda", 0), torch.bfloat16):
        pytest.skip("compute capability below 8.0")
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    for total in (torch.ones(512, 512, device="cuda"), torch.ones(512, 512, device="cuda").t()):
        expected = total + a.float() @ b.float()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        deferred_weight_gradients.add_product(total, a, b)
        assert torch.cuda.max_memory_allocated() - before < total.nbytes
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)


def test_within_autocast_the_native_operation_runs() -> None:
    """It casts the weight, and autograd knows how to go back; nothing is kept."""
    native = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin, queue = deferred(native)
    given, gradient = torch.randn(5, 3), torch.randn(5, 2).bfloat16()
    for model in (native, twin):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(given)
        assert output.dtype == torch.bfloat16
        output.backward(gradient)
    assert queue.take() == []
    assert_equal(twin, native)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (2, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_of_a_deferred_linear_may_be_modified_in_place(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(3, 4, bias=bias, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    model, plain = nn.Sequential(layer, nn.ReLU(inplace=True)), nn.Sequential(twin, nn.ReLU(inplace=True))
    queue = WeightGradientQueue()
    defer_weight_gradients(model, queue)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    other = input.detach().clone().requires_grad_()
    output, expected = model(input), plain(other)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    queue.run()
    torch.testing.assert_close(input.grad, other.grad)
    for got, wanted in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("learns", [True, False])
def test_a_token_without_a_row_is_told_with_the_size_of_the_table(learns: bool) -> None:
    table, _ = deferred(nn.Embedding(5, 3).requires_grad_(learns))
    with pytest.raises(DataError, match="numbers from 1 to 7 were looked up in an embedding of 5 rows"):
        table(torch.tensor([1, 7]))
