from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.engine.pipeline.loss_stage import LossStage, OverwritingLossStage
from plait.engine.pipeline.stage import Stage
from plait.estimate.memory.layer_traces import Trace, trace_layer, trace_loss
from plait.models.layers.shape_inference import infer
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.losses import cross_entropy
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import tensors_of

ROWS, WIDTH = 4, 8
SIZE = ROWS * WIDTH * 4
"""Bytes of what flows."""


class Call(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def traced(module: nn.Module, *, learns: bool = True, adds_late: bool = False) -> Trace:
    """Of a layer on meta, for an input `[ROWS, WIDTH]`."""
    queue, layer = WeightGradientQueue(adds_late), NamedLayer("layer", module.to("meta"))
    defer_weight_gradients(module, queue)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    given = torch.empty(ROWS, WIDTH, device="meta", requires_grad=learns)
    infos = infer([layer], given, input_gradients=learns)
    trace, following = trace_layer(Stage(0, [layer], queue, [infos]), given)
    shapes = [tuple(tensor.shape) for tensor in tensors_of(following)]
    assert shapes == [info.shape for info in infos[0].tensors]
    return trace


def sizes(trace: Trace) -> tuple[int, int]:
    """Bytes that the layer makes and keeps: from `F` to `I`, and from `I` to `W`, its input left out."""
    allocated = {**trace.forward.allocated, **trace.backward.allocated}
    return tuple(  # type: ignore[return-value]
        sum(allocated.get(number, 0) for number in phase.saved) for phase in (trace.forward, trace.backward)
    )


def test_a_linear_keeps_its_input_and_then_the_gradient_of_its_output() -> None:
    trace = traced(nn.Linear(WIDTH, WIDTH))
    (given,), (output,), (seed,) = trace.inputs, trace.forward.results, trace.output_gradients
    assert trace.forward.allocated == {output: SIZE}
    assert set(trace.forward.saved) == {given, output}
    assert set(trace.backward.saved) == {given, seed}
    assert trace.backward.allocated == {trace.backward.results[0]: SIZE}


def test_parameter_gradients_of_an_input_backward_wait_for_weight_work_only_if_added_late() -> None:
    """The gradients of a norm's scale and shift."""
    assert sizes(traced(nn.LayerNorm(WIDTH))) == (SIZE + 2 * ROWS * 4, 0)
    assert sizes(traced(nn.LayerNorm(WIDTH), adds_late=True)) == (SIZE + 2 * ROWS * 4, 2 * WIDTH * 4)


def test_a_layer_in_place_gives_a_copy_of_its_input() -> None:
    trace = traced(nn.ReLU(inplace=True))
    assert trace.forward.allocated == {trace.forward.results[0]: SIZE}
    assert not trace.backward.saved


def test_a_view_in_a_trace_shares_the_memory_of_its_base() -> None:
    trace = traced(nn.Flatten())
    assert trace.forward.results == trace.inputs
    assert not trace.forward.allocated


def test_an_input_returned_as_output_shares_its_memory_in_a_trace() -> None:
    trace = traced(Call(lambda value: (value, value.sin())))
    assert trace.forward.results[0] == trace.inputs[0]
    assert trace.forward.allocated == {trace.forward.results[1]: SIZE}


def test_a_layer_whose_input_needs_no_gradient_has_an_empty_backward_trace() -> None:
    trace = traced(nn.Tanh(), learns=False)
    assert trace.output_gradients == (None,)
    assert trace.backward.results == (None,)
    assert not trace.backward.allocated


def test_the_peak_of_a_traced_phase_counts_temporaries() -> None:
    trace = traced(Call(lambda value: torch.cat([value, value]).sum(0)))
    assert trace.forward.allocated == {trace.forward.results[0]: WIDTH * 4}
    assert trace.forward.peak == 2 * SIZE + WIDTH * 4


class Stubborn(torch.autograd.Function):
    """Its backward looks at values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value * 2)
        return value + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum())


def test_a_backward_that_does_not_run_on_meta_is_taken_to_keep_all() -> None:
    trace = traced(Call(Stubborn.apply))
    assert sizes(trace)[0] == sizes(trace)[1] == 2 * SIZE
    (flow,) = trace.backward.results
    assert trace.backward.allocated == {flow: SIZE}
    assert flow not in (*trace.forward.allocated, *trace.inputs, *trace.output_gradients)


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(ROWS, WIDTH, dtype=dtype, device="meta", requires_grad=True)


def test_cross_entropy_keeps_the_logarithms_of_probabilities() -> None:
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    trace = trace_loss(LossStage(cross_entropy), logits(), targets)
    assert sorted(trace.forward.allocated.values()) == [4, SIZE]
    assert trace.backward.allocated == {trace.backward.results[0]: SIZE}
    assert not trace.backward.saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cross_entropy_in_place_allocates_nothing_that_stays(dtype: torch.dtype) -> None:
    end = OverwritingLossStage(CrossEntropyInPlace(cross_entropy, None))
    trace = trace_loss(end, logits(dtype), torch.empty(ROWS, dtype=torch.int64, device="meta"))
    assert trace.backward.results == trace.inputs == trace.forward.saved
    assert not trace.forward.allocated
    assert not trace.backward.allocated
    assert trace.backward.peak == 0


class Looking:
    """A loss that looks at values."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return output.sum() * output.max().item()


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 1)])
def test_a_loss_that_does_not_run_on_meta_is_taken_to_copy_its_input(dtype: torch.dtype, wide: int) -> None:
    trace = trace_loss(LossStage(Looking()), logits(dtype), None)
    output = ROWS * WIDTH * dtype.itemsize
    assert list(trace.forward.allocated.values()) == [wide * output]
    assert set(trace.forward.saved) == {*trace.inputs, *trace.forward.allocated}
    assert trace.backward.allocated == {trace.backward.results[0]: output}
