from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.engine.pipeline.stage import Stage
from plait.errors import ModelError
from plait.models.layers.layer_sequence import private_copy, sequence_of
from plait.models.layers.shape_inference import infer
from plait.plan.plan import Recompute
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.nested_values import Value, leaf_of


class Call(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Value) -> Value:
        return self.function(value)


class Watched(nn.Module):
    """A linear on a tensor made on the way; tells whether that and the graph before it are alive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.references: list[weakref.ref[Any]] = []

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(Doubled.apply(value, self.references))

    def alive(self) -> tuple[bool, ...]:
        """The linear's input, and what only the backward of the input needs."""
        return tuple(reference() is not None for reference in self.references)


class Kept:
    """What a layer's own backward needs, and its weight work does not."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, references: list[weakref.ref[Any]]) -> Tensor:
        if value.is_meta:
            return value * 2
        memory = np.empty(tuple(value.shape), dtype=np.float32)  # alive while any tensor stands on it
        ctx.kept = Kept()
        references += [weakref.ref(memory), weakref.ref(ctx.kept)]
        doubled = torch.from_numpy(memory)
        doubled.copy_(value * 2)
        return doubled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def stage_of(*layers: nn.Module, batch: Value, number: int = 0, recompute: Recompute = "none") -> Stage:
    """A stage of its own model, deferred, with zero gradients."""
    model = nn.Sequential(*layers)
    sequence = sequence_of(model)
    twins = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    infos = infer(private_copy(sequence.layers, twins), batch, input_gradients=True)
    queue = WeightGradientQueue()
    for layer in sequence.layers:
        defer_weight_gradients(layer.module, queue)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return Stage(number, sequence.layers, queue, [infos] * 8, recompute=[recompute] * len(sequence.layers))


def forward(stage: Stage, batch: Tensor, microbatch: int = 0) -> Value:
    stage.values[microbatch] = leaf_of(batch, batch.is_floating_point())
    for layer in range(len(stage.layers)):
        stage.forward(microbatch, layer)
    return stage.values.pop(microbatch)


def backward(stage: Stage, gradient: Tensor, microbatch: int = 0) -> Tensor | None:
    stage.gradients[microbatch] = [gradient]
    for layer in reversed(range(len(stage.layers))):
        stage.backward_input(microbatch, layer)
    for layer in reversed(range(len(stage.layers))):
        stage.backward_weight(microbatch, layer)
    (result,) = stage.gradients.pop(microbatch)
    return result


def there_and_back(stage: Stage, batch: Tensor, microbatch: int) -> None:
    forward(stage, batch, microbatch)
    backward(stage, torch.ones_like(batch), microbatch)


def is_empty(stage: Stage) -> bool:
    return not any((stage.values, stage.gradients, stage.runs, stage.work, stage.queue.pending))


def test_two_microbatches_in_flight_equal_the_whole_model() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 3), nn.Tanh()]
    native = copy.deepcopy(nn.Sequential(*layers)).double()
    batches = [torch.randn(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    gradients = [torch.randn(2, 3, dtype=torch.float64) for _ in range(2)]
    stage = stage_of(*copy.deepcopy(native), batch=batches[0])
    outputs = [forward(stage, batch, number) for number, batch in enumerate(batches)]
    for number, (batch, gradient) in enumerate(zip(batches, gradients, strict=True)):
        wanted = native(batch)
        assert torch.equal(outputs[number], wanted)
        wanted.backward(gradient)
        torch.testing.assert_close(backward(stage, gradient, number), batch.grad, rtol=1e-14, atol=1e-14)
    ours = [parameter for layer in stage.layers for parameter in layer.module.parameters()]
    for parameter, other in zip(ours, native.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-14, atol=1e-14)
    assert is_empty(stage)


def test_the_input_gradient_frees_all_but_tensors_for_the_weight_gradient() -> None:
    first, last = layers = [Watched(2), Watched(2)]
    stage = stage_of(*layers, batch=torch.randn(3, 2))
    forward(stage, torch.randn(3, 2))
    stage.gradients[0] = [torch.ones(3, 2)]
    assert (first.alive(), last.alive()) == ((True, True), (True, True))
    stage.backward_input(0, 1)
    assert (first.alive(), last.alive()) == ((True, True), (True, False))
    stage.backward_input(0, 0)
    assert (first.alive(), last.alive()) == ((True, False), (True, False))
    stage.backward_weight(0, 1)
    assert (first.alive(), last.alive()) == ((True, False), (False, False))
    stage.backward_weight(0, 0)
    assert (first.alive(), last.alive()) == ((False, False), (False, False))
    assert not stage.runs


def test_a_layers_output_is_freed_once_the_next_layer_ran_without_saving_it() -> None:
    made: list[weakref.ref[Tensor]] = []

    def remember(value: Tensor) -> Tensor:
        output = value + 1
        made.append(weakref.ref(output))
        return output

    stage = stage_of(Call(remember), Call(remember), batch=torch.ones(2))
    made.clear()
    with torch.no_grad():
        forward(stage, torch.ones(2))
    assert [reference() for reference in made] == [None, None]
    assert not stage.runs


def test_a_stage_passes_outputs_and_gradients_to_another_on_its_rank() -> None:
    first, last = (
        stage_of(nn.Linear(2, 2), batch=torch.ones(1, 2)),
        stage_of(nn.Tanh(), batch=torch.ones(1, 2)),
    )
    first.values[0] = leaf_of(torch.ones(1, 2), True)
    first.forward(0, 0)
    last.values[0] = first.values.pop(0)
    last.forward(0, 0)
    last.values.pop(0)
    last.gradients[0] = [torch.ones(1, 2)]
    last.backward_input(0, 0)
    first.gradients[0] = last.gradients.pop(0)
    first.backward_input(0, 0)
    first.backward_weight(0, 0)
    leaf = torch.ones(1, 2, requires_grad=True)
    weight = first.layers[0].module.weight
    wanted = torch.autograd.grad(
        torch.tanh(torch.nn.functional.linear(leaf, weight, first.layers[0].module.bias)).sum(), weight
    )
    torch.testing.assert_close(weight.grad, wanted[0])


class Spread(nn.Module):
    """Tokens and a tensor made of them, as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, tokens: Tensor) -> Value:
        return {"x": tokens.unsqueeze(-1) * self.scale, "tokens": tokens}


def test_layers_pass_several_tensors_and_integers_without_gradient() -> None:
    tokens = torch.tensor([1, 2])
    stage = stage_of(Spread(), Call(lambda value: value["x"] * value["tokens"].unsqueeze(-1)), batch=tokens)
    output = forward(stage, tokens)
    assert output.tolist() == [[2.0, 3.0], [8.0, 12.0]]
    assert backward(stage, torch.ones_like(output)) is None
    assert stage.layers[0].module.scale.grad.tolist() == [5.0, 5.0]


def test_no_gradient_flows_through_a_detached_output() -> None:
    stage = stage_of(nn.Linear(2, 2), Call(Tensor.detach), batch=torch.ones(1, 2))
    forward(stage, torch.ones(1, 2))
    assert backward(stage, torch.ones(1, 2)) is None
    assert not stage.layers[0].module.weight.grad.any()


def test_a_layer_that_differentiates_inside_leaves_no_weight_work() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(2, 1)

        def forward(self, value: Tensor) -> Tensor:
            with torch.enable_grad():
                place = value.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(place).sum(), place)
            return value + force

    stage = stage_of(Force(), batch=torch.ones(3, 2))
    forward(stage, torch.ones(3, 2))
    backward(stage, torch.ones(3, 2))
    assert not stage.layers[0].module.energy.weight.grad.any()


def fail(value: Tensor) -> Tensor:
    raise ZeroDivisionError("in the middle")


class FailBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return fail(gradient)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_layer_has_a_note_of_stage_micro_batch_and_layer(where: str) -> None:
    stage = stage_of(nn.Tanh(), Call(lambda x: x * 1), batch=torch.ones(2), number=3)
    stage.layers[1].module.function = fail if where == "forward" else FailBackward.apply
    with pytest.raises(ZeroDivisionError) as caught:
        there_and_back(stage, torch.ones(2), microbatch=5)
    assert caught.value.__notes__ == ["in stage 3, micro-batch 5, layer '1'"]


def test_clearing_a_stage_forgets_micro_batches_in_flight() -> None:
    stage = stage_of(nn.Linear(2, 2), batch=torch.ones(1, 2))
    forward(stage, torch.ones(1, 2), 0)
    forward(stage, torch.ones(1, 2), 1)
    stage.gradients[0] = [torch.ones(1, 2)]
    stage.backward_input(0, 0)
    stage.clear()
    assert is_empty(stage)


def test_a_gradient_of_another_shape_is_refused() -> None:
    stage = stage_of(nn.Linear(2, 2), batch=torch.ones(1, 2))
    forward(stage, torch.ones(1, 2))
    with pytest.raises(
        ModelError, match=r"a gradient of shape \[2\] came back for an output of (shape )?\[1, 2\]"
    ):
        backward(stage, torch.ones(2))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_without_gradients_a_layer_runs_once(mode: Recompute) -> None:
    batch, runs = torch.zeros(2, 4), []
    stage = stage_of(Call(lambda value: runs.append(value) or value + 1), batch=batch, recompute=mode)
    runs.clear()
    with torch.no_grad():
        assert not forward(stage, batch).requires_grad
    assert len(runs) == 1


class OwnBackward(nn.Module):
    """A layer that takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = value.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(inner).sum(), inner)
        return value * slope


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_layers_own_backward_adds_no_weight_gradient(mode: Recompute) -> None:
    batch = torch.ones(2, 4)
    stage = stage_of(OwnBackward(), batch=batch, recompute=mode)
    there_and_back(stage, batch, 0)
    (layer,) = stage.layers
    assert all(p.grad is not None and not p.grad.any() for p in layer.module.parameters())
