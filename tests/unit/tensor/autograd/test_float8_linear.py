"""A float8 linear: what it saves, what waits for W, how its input is cast once, and what it adds up."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.live_bytes import LiveBytes
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.ranks.group import alone
from plait.tensor.autograd import float8_inputs
from plait.tensor.autograd.float8_linear import float8_linear
from plait.tensor.autograd.float8_operands import LinearCasts, cast_together, transposed
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.float8.recipes import RECIPES
from plait.tensor.float8.scaled_product import product
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.apply_float8 import Float8Layers

TOKENS, HIDDEN, INNER = 64, 64, 128


def in_float8(module: nn.Module, recipe: str, *names: str) -> tuple[Any, WeightGradientQueue]:
    """A copy of `module` whose linears `names` multiply in float8, its gradients zero."""
    twin, queue = copy.deepcopy(module), WeightGradientQueue()
    layers = Float8Layers(
        RECIPES[recipe], [f"layer.{name}" for name in names], alone("tp"), alone("cp"), alone("etp")
    )
    layers.apply(NamedLayer("layer", twin), queue, {}, on_parts=False)
    for parameter in twin.parameters():
        queue.buffers[id(parameter)] = torch.zeros_like(parameter, dtype=torch.float32)
    return twin, queue


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_inputs_of_linears_are_kept_in_eight_bits_beside_no_sixteen(recipe: str) -> None:
    """In 16 bits stays what the activation reads, and with weight gradients in bf16 their operands."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)).bfloat16()
    twin, queue = in_float8(mlp, recipe, "0", "2")
    bits = 2 if recipe == "float8-rowwise-gw" else 1
    scales = 4 * (2 * TOKENS + 4 * (HIDDEN + INNER)) + 256  # of operands and weights, in fp32
    with LiveBytes() as alive:
        given = values(TOKENS, HIDDEN).requires_grad_()
        output = twin(given * 1)
        of_output, of_activation = output.nbytes, 2 * TOKENS * INNER
        queue.inputs.forget()
        weights = sum(one.nbytes for one in twin.parameters())
        kept = alive.count() - weights - given.nbytes - of_output - of_activation
        operands = bits * TOKENS * (HIDDEN + INNER)
        assert operands <= kept <= operands + scales
        output.backward(gradient := values(TOKENS, HIDDEN))
        del output
        waiting = alive.count() - weights - 2 * given.nbytes - gradient.nbytes
        of_gradients = sum(one.nbytes for one in twin.parameters() if one.dim() == 1)
        operands += bits * TOKENS * (INNER + HIDDEN)
        if bits == 2:
            operands -= gradient.nbytes  # the output's gradient, which the test holds
        assert operands <= waiting - of_gradients <= operands + scales
    assert len(queue.take()) == 2


def test_linears_of_one_input_cast_it_once_and_sum_its_gradients_in_fp32(monkeypatch: Any) -> None:
    pair, casts = nn.ModuleList([nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2)]).bfloat16(), []

    class Counted(float8_inputs.CastInput):
        def __init__(self, *arguments: Any) -> None:
            casts.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(float8_inputs, "CastInput", Counted)
    twin, queue = in_float8(pair, "float8", "0", "1")
    given, gradients = (
        values(2, 16, HIDDEN).requires_grad_(),
        [values(2, 16, INNER), values(2, 16, INNER) * 3],
    )
    torch.autograd.backward([twin[0](given), twin[1](given)], gradients)
    assert len(casts) == 1
    own = LinearCasts(RECIPES["float8"])
    summands = [
        product(
            *cast_together([own.gradient(gradient.view(-1, INNER))]),
            LinearCasts(RECIPES["float8"]).weight_for_input(one.weight.detach(), None),
            torch.float32,
        )
        for one, gradient in zip(twin, gradients, strict=True)
    ]
    assert given.grad is not None
    assert torch.equal(given.grad.view(-1, HIDDEN), (summands[0] + summands[1]).bfloat16())
    with torch.no_grad():
        given.add_(1)  # other values: they are cast anew
    twin[0](given)
    assert len(casts) == 2
    assert len(queue.pending) == 2


@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_a_weight_gradient_is_added_by_its_work_and_not_before(recipe: str) -> None:
    twin, queue = in_float8(nn.Sequential(nn.Linear(HIDDEN, INNER).bfloat16()), recipe, "0")
    weight = twin[0].weight
    given, gradient = values(TOKENS, HIDDEN), values(TOKENS, INNER)
    twin(given.requires_grad_()).backward(gradient)
    buffer = queue.buffer_of(weight)
    assert not buffer.any()
    buffer.fill_(2.0)
    with torch.no_grad():
        queue.run()
    exact = gradient.float().t() @ given.detach().float()
    error = (buffer - 2 - exact).norm() / exact.norm()
    assert 0 < error < (0.01 if recipe == "float8-rowwise-gw" else 0.1)


def test_a_frozen_weight_leaves_no_operand_and_no_work() -> None:
    twin, queue = in_float8(nn.Sequential(nn.Linear(HIDDEN, INNER).bfloat16()), "float8-rowwise", "0")
    twin.requires_grad_(False)
    given = values(TOKENS, HIDDEN).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        output = twin(given)
    assert not saved
    output.backward(values(TOKENS, INNER))
    assert given.grad is not None
    assert not queue.pending


def test_a_second_backward_is_refused() -> None:
    twin, _ = in_float8(nn.Sequential(nn.Linear(HIDDEN, INNER).bfloat16()), "float8", "0")
    output = twin(values(TOKENS, HIDDEN).requires_grad_())
    output.backward(values(TOKENS, INNER), retain_graph=True)
    with pytest.raises(ModelError, match="a linear"):
        output.backward(values(TOKENS, INNER))


def test_an_evaluation_multiplies_in_float8_too_and_keeps_nothing() -> None:
    twin, queue = in_float8(nn.Sequential(nn.Linear(HIDDEN, INNER).bfloat16()), "float8", "0")
    given = values(TOKENS, HIDDEN)
    with torch.no_grad():
        evaluated = twin(given)
    assert torch.equal(evaluated, twin(given.requires_grad_()))
    assert not torch.equal(evaluated, nn.functional.linear(given, twin[0].weight, twin[0].bias))
    assert not queue.pending


def test_factors_of_a_weight_hold_for_a_step() -> None:
    casts, weight = LinearCasts(RECIPES["float8"]), values(INNER, HIDDEN)
    before = casts.weight(weight, None)
    weight *= 4
    assert torch.equal(casts.weight(weight, None).scale, before.scale)
    casts.begin_step()
    assert torch.equal(casts.weight(weight, None).scale, 4 * before.scale)


def test_transposed_matrices_are_views_with_scales_in_the_other_direction() -> None:
    casts = LinearCasts(RECIPES["float8-rowwise"])
    rows = casts.weight(values(INNER, HIDDEN), None)
    data, scale = transposed(rows)
    assert data.shape == (HIDDEN, INNER)
    assert data.data_ptr() == rows.data.data_ptr()
    assert torch.equal(scale, rows.scale.t())


@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_a_transposed_weight_gives_the_bits_of_the_other(recipe: str) -> None:
    """That of `Conv1D`, `[in, out]`."""
    stored = values(HIDDEN, INNER)
    found = []
    for is_transposed in (False, True):
        weight = nn.Parameter(stored.clone() if is_transposed else stored.t().contiguous())
        queue, casts = WeightGradientQueue(), LinearCasts(RECIPES[recipe])
        module = SimpleNamespace(weight=weight, bias=None, casts=casts, weight_scale=None)
        queue.buffers[id(weight)] = buffer = torch.zeros(weight.shape)
        given = values(TOKENS, HIDDEN).requires_grad_()
        output = float8_linear(module, given, queue, is_transposed=is_transposed)
        output.backward(values(TOKENS, INNER))
        with torch.no_grad():
            queue.run()
        found.append([output, given.grad, buffer if is_transposed else buffer.t()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.full
@pytest.mark.transformers
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_linears_with_transposed_weights_equal_eager_ones(recipe: Any) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(Conv1D(INNER, HIDDEN), nn.GELU(), Conv1D(HIDDEN, INNER)), nn.Linear(HIDDEN, 10)
    ).double()
    inputs, targets = torch.randn(2, 16, HIDDEN, dtype=torch.float64), torch.randint(10, (2, 16))
    gradients = []
    for compiled in (False, "graphs"):
        plan = Plan(linears=recipe, precision="fp64", compile=compiled)  # type: ignore[arg-type]
        engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
        assert list(engine.linear_formats.values()) == [recipe, recipe, "head"]
        engine.forward_backward(inputs, targets)
        gradients.append({name: one.clone() for name, one in engine.named_gradients()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-12, atol=1e-14)


def test_the_carrier_of_a_region_is_left_when_its_input_has_been_written_to() -> None:
    inputs, casts = float8_inputs.CastInputs(), LinearCasts(RECIPES["float8"])
    entered = torch.randn(2, 16, requires_grad=True) * 1
    carrier = float8_inputs.carrier_like(entered)
    inputs.enter(entered, carrier, float8_inputs.InputGradient())
    assert inputs.of(entered, casts).carrier is carrier
    entered.relu_()
    later = inputs.of(entered, casts).carrier
    assert later is not carrier
    assert later.grad_fn is not None, "the gradient passes through relu"


class CallsWithin(nn.Module):
    """Calls a linear within `torch.autocast`, which may be disabled."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.inner, self.enabled = nn.Linear(HIDDEN, HIDDEN), enabled

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return value + self.inner(value).to(value.dtype)


@pytest.mark.parametrize("compiled", [False, "graphs"])
def test_a_float8_linear_within_autocast_is_refused(compiled: Any) -> None:
    """Its gradients would else be lost without a word."""
    plan = Plan(linears="float8", compile=compiled)
    inputs, targets = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)

    def gradient(enabled: bool) -> Tensor:
        model = nn.Sequential(CallsWithin(enabled), nn.Linear(HIDDEN, HIDDEN))
        engine = plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss)
        engine.forward_backward(inputs, targets)
        grad = dict(engine.named_parameters())["0.inner.weight"].grad
        assert grad is not None
        return grad

    assert gradient(enabled=False).abs().sum() > 0
    with pytest.raises(ModelError, match=r"\[64, 64\] multiplies in float8.* within torch.autocast"):
        gradient(enabled=True)


@pytest.mark.parametrize("strategy", ["none", "optimizer"])
def test_a_float8_linear_refuses_an_input_in_another_dtype_as_other_linears_do(strategy: Any) -> None:
    """Also where its weight is in eight bits, which have no such dtype."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value.float()).to(value.dtype)

    plan = Plan(linears="float8", precision="bf16", strategy=strategy)
    model = nn.Sequential(Calls(), nn.Linear(HIDDEN, HIDDEN))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss)
    with pytest.raises(ModelError, match=r"in bfloat16 multiplies in float8.* its input is in float32: cast"):
        engine.forward_backward(torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN))
