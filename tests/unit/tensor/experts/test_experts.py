"""Experts of one rank against a plain loop: outputs, all gradients, deferred or not, recomputed or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from expert_cases import ADAPTED, CASES, Answer, Case, answer, assert_close, assert_near, plain
from torch import Tensor, nn

from plait.engine.pipeline.recompute import recomputing
from plait.errors import DataError, ModelError
from plait.plan.plan import Recompute
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WEIGHTS_AT_ONCE, WeightGradientQueue
from plait.tensor.experts import assignments
from plait.tensor.experts.experts import Experts, start_experts


def plain_answer(case: Case) -> Answer:
    layer = case.layer()
    return answer(lambda *given: plain(layer, *given), layer, case.inputs(), case.gradient())


def deferring(case: Case) -> tuple[Experts, WeightGradientQueue]:
    """Experts with a queue; their gradient buffers are zero."""
    layer, queue = case.layer(), WeightGradientQueue()
    defer_weight_gradients(layer, queue)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layer, queue


@pytest.mark.parametrize("name", [*CASES, *ADAPTED])
def test_outputs_and_all_gradients_are_those_of_a_loop_over_experts(name: str) -> None:
    case = (CASES | ADAPTED)[name]
    layer = case.layer()
    assert_close(answer(layer, layer, case.inputs(), case.gradient()), plain_answer(case))


@pytest.mark.parametrize("name", [*CASES, *ADAPTED])
def test_the_backward_queues_weight_gradients_and_computes_the_others(name: str) -> None:
    case = (CASES | ADAPTED)[name]
    layer, queue = deferring(case)
    found = answer(layer, layer, case.inputs(), case.gradient())
    assert not any(one.any() for one in found.of_parameters.values())
    with torch.no_grad():
        kept = {name: one.clone() for name, one in layer.named_parameters()}
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))  # as if freed: `W` reads no parameter
    queue.run()
    assert_close(found, plain_answer(case))
    assert kept.keys() == found.of_parameters.keys()


def test_a_second_micro_batch_adds_to_weight_gradients_and_the_first_of_a_step_overwrites() -> None:
    case = CASES["biases"]
    layer, queue = deferring(case)
    assert layer.gate_up_proj.grad is not None
    layer.gate_up_proj.grad.fill_(float("nan"))  # from the step before
    queue.unwritten = set(queue.products)
    for _ in range(2):
        found = answer(layer, layer, case.inputs(), case.gradient())
        queue.run()
    for name, one in plain_answer(case).of_parameters.items():
        assert_near(found.of_parameters[name], 2 * one, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [8, 256])
@pytest.mark.parametrize("tokens", [0, 6])
def test_weight_gradients_of_experts_without_tokens_are_zero_whatever_memory_held(
    dtype: torch.dtype, inner: int, tokens: int
) -> None:
    case = Case(tokens, experts=8, hidden=64, inner=inner, routing="one", dtype=dtype)
    layer, queue = deferring(case)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    queue.unwritten = set(queue.products)
    with uninitialized_memory_is_nan():
        found = answer(layer, layer, case.inputs(), case.gradient())
        queue.run()
        layer = case.layer()
        plainly = answer(layer, layer, case.inputs(), case.gradient())
    for of_parameters in (found.of_parameters, plainly.of_parameters):
        for one in of_parameters.values():
            assert not one[:6].any()
            assert one.isfinite().all()


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("inner", [8, 160])
@pytest.mark.parametrize("buffer", [torch.float32, torch.bfloat16])
def test_sixteen_bit_weight_gradients_are_added_to_buffers_of_either_width(
    inner: int, buffer: torch.dtype
) -> None:
    """With 160 inner features gradients are large enough to be added in a loop."""
    case = Case(tokens=64, experts=3, hidden=64, inner=inner, dtype=torch.bfloat16)
    layer, queue = deferring(case)
    held = queue.set_aside(layer.parameters())
    queue.buffers = {key: one.to(buffer) for key, one in queue.buffers.items()}
    found = answer(layer, layer, case.inputs(), case.gradient())
    queue.run()
    wide = Case(tokens=64, experts=3, hidden=64, inner=inner)
    exact = wide.layer()
    with torch.no_grad():
        for one, narrow in zip(exact.parameters(), layer.parameters(), strict=True):
            one.copy_(narrow)
    hidden, indices, weights = case.inputs()
    given = hidden.double(), indices, weights.double()
    wanted = answer(lambda *all: plain(exact, *all), exact, given, case.gradient().double())
    for (name, one), (parameter, _) in zip(wanted.of_parameters.items(), held, strict=True):
        # Roundings: of gate and up, of the activation, of its gradient, of the sum: each 2^-9 of the largest.
        assert_near(queue.buffers[id(parameter)].double(), one, name, 4 * 2**-8)
    assert_near(found.output.double(), wanted.output, "output", 4 * 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "odd sizes", "gpt-oss", "no tokens"])
def test_grouped_products_round_as_often_as_a_loop_does(name: str, dtype: torch.dtype) -> None:
    of = CASES[name]
    case = Case(of.tokens, of.experts, of.top_k, of.hidden, of.inner, of.options, dtype=dtype)
    layer = case.layer()
    found = answer(layer, layer, case.inputs(), case.gradient())
    exact = copy.deepcopy(layer).double()
    hidden, indices, weights = case.inputs()
    given = hidden.double(), indices, weights.double()
    wanted = answer(lambda *all: plain(exact, *all), exact, given, case.gradient().double())
    double = Answer(
        found.output.double(),
        found.of_hidden.double(),
        found.of_weights.double(),
        {name: one.double() for name, one in found.of_parameters.items()},
    )
    # Eight roundings one after another: two products, activation, weight, and as many backward.
    assert_close(double, wanted, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["plain", "gpt-oss", "no tokens"])
def test_recomputed_experts_have_the_bits_of_kept_ones_and_are_assigned_once(
    name: str, mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = CASES[name], []

    def counted(compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **more: calls.append(1) or compute(*given, **more)

    def results(mode: Recompute) -> Answer:
        layer, queue = deferring(case)
        hidden, indices, weights = case.inputs()

        def run(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            given = torch.cat([hidden, weights], 1)

            def compute(joined: Tensor) -> Tensor:
                parts = (joined * 1).split([case.hidden, case.top_k], 1)
                output: Tensor = layer(parts[0], indices, parts[1])
                return output.sin()

            return recomputing(mode, compute, decides=True)(given)

        found = answer(run, layer, (hidden, indices, weights), case.gradient())
        queue.run()
        return found

    wanted = results("none")
    monkeypatch.setattr("plait.tensor.experts.experts.assign", counted(assignments.assign))
    assert_close(results(mode), wanted, 0.0)
    assert len(calls) == 1


def test_a_number_of_minus_one_stands_for_no_expert() -> None:
    case = Case()
    layer = case.layer()
    hidden, indices, weights = case.inputs()
    indices[3], indices[5, 1] = -1, -1
    found = answer(layer, layer, (hidden, indices, weights), case.gradient())
    reference = case.layer()
    given = hidden, indices, weights
    assert_close(found, answer(lambda *all: plain(reference, *all), reference, given, case.gradient()))
    assert not found.output[3].any()
    assert not found.of_weights[3].any()


def test_frozen_and_computed_parameters_queue_nothing() -> None:
    case = Case()
    layer, queue = deferring(case)
    layer.down_proj.requires_grad_(False)
    base, factor = layer.gate_up_proj.detach(), torch.ones((), dtype=torch.float64, requires_grad=True)
    del layer.gate_up_proj
    layer.gate_up_proj = base * factor  # as an adapter computes it
    hidden, indices, weights = case.inputs()
    layer(hidden, indices, weights).backward(case.gradient())
    assert not queue.take()
    assert factor.grad is not None
    wanted = (plain_answer(case).of_parameters["gate_up_proj"] * base).sum()
    assert_near(factor.grad, wanted, "factor")


def test_where_weights_are_due_at_once_nothing_waits_in_the_queue() -> None:
    case = Case()
    layer, queue = deferring(case)
    queue.mode = WEIGHTS_AT_ONCE
    found = answer(layer, layer, case.inputs(), case.gradient())
    assert not queue.take()
    assert_close(found, plain_answer(case))


def test_second_derivatives_and_second_backwards_are_refused() -> None:
    case = Case()
    layer, _ = deferring(case)
    given = case.inputs()
    output = layer(given[0].requires_grad_(), *given[1:]).sum()
    output.backward(retain_graph=True)
    with pytest.raises(ModelError, match="a layer of experts met a second backward"):
        output.backward()
    layer = case.layer()
    output = layer(given[0], *given[1:]).sum()
    with pytest.raises(ModelError, match="create_graph"):
        torch.autograd.grad(output, given[0], create_graph=True)


def test_on_meta_every_expert_has_as_many_tokens() -> None:
    case = Case(tokens=10, experts=4)
    layer = case.layer().to("meta")
    hidden, indices, weights = (one.to("meta") for one in case.inputs())
    found = assignments.assign(indices, range(4))
    assert found.groups.sizes == (5, 5, 5, 5)
    output = layer(hidden.requires_grad_(), indices, weights)
    output.backward(torch.empty_like(output))
    assert hidden.grad is not None
    assert output.shape == hidden.grad.shape == hidden.shape
    assert all(one.grad is not None and one.grad.shape == one.shape for one in layer.parameters())


def test_under_autocast_experts_compute_in_its_dtype_as_linears_do() -> None:
    case = Case(dtype=torch.float32, options={"bias": True})
    layer = case.layer()
    narrow = copy.deepcopy(layer).bfloat16()
    hidden, indices, weights = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = answer(layer, layer, (hidden, indices, weights), case.gradient().bfloat16())
    wanted = answer(narrow, narrow, (hidden.bfloat16(), indices, weights), case.gradient().bfloat16())
    assert torch.equal(found.output, wanted.output)
    for name, one in found.of_parameters.items():
        assert one.dtype == torch.float32
        assert torch.equal(one, wanted.of_parameters[name].float())


def test_an_evaluation_saves_nothing_and_has_the_bits_of_training() -> None:
    case = CASES["gpt-oss"]
    layer, given = case.layer(), case.inputs()
    with torch.no_grad():
        evaluated = layer(*given)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, layer(*given))


def test_numbers_of_experts_that_do_not_exist_are_refused() -> None:
    case = Case()
    layer, (hidden, indices, weights) = case.layer(), case.inputs()
    for wrong in (layer.num_experts, -2):
        changed = indices.clone()
        changed[0, 0] = wrong
        with pytest.raises(
            DataError, match=f"tokens were sent to the experts .* of {layer.num_experts}: give"
        ):
            layer(hidden, changed, weights)


class Doubled(Experts):
    def forward(self, *given: Any) -> Tensor:
        return 2 * super().forward(*given)


def test_experts_of_a_class_with_a_forward_of_its_own_are_called_by_it() -> None:
    case = Case()
    layer, given = case.layer(), case.inputs()
    expected = 2 * start_experts(layer, nn.Identity(), *given)()
    layer.__class__ = Doubled
    assert torch.equal(start_experts(layer, nn.Identity(), *given)(), expected)
