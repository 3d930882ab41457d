"""The graphs of a layer for inputs of one shape: traced, divided in forward and backward, cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node

from plait.engine.compilation.compiled_calls import LayerCall, LayerOperations, with_strides
from plait.engine.compilation.graph_division import JointGraph, divided
from plait.engine.compilation.graph_to_calls import steps_of
from plait.engine.compilation.torch_compiler import (
    COMPILER_LOCK,
    example_of,
    joint_graph,
    move_to_meta,
    without_memory,
)
from plait.models.layers.shape_inference import LayerInfo, wrong_gradient_shape
from plait.plan.plan import Recompute
from plait.tensor.autograd.between_graphs import TRACE, LayerTrace
from plait.tensor.dropout import names_of
from plait.tensor.layer_values import NamedLayer, Value, list_of_tensors, map_tensors, with_tensors


@dataclass(frozen=True)
class OutputGradient:
    """Shape, strides and dtype that the traced backward expects of the gradient of one output tensor."""

    number: int
    """Of the tensor in the output."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient among those of the outputs, with the strides of the trace; zeros for None."""
        found = gradients[self.number]
        if found is not None and found.shape == self.shape and found.stride() == self.stride:
            return found  # the common case, kept cheap
        if found is None:
            device = next(one.device for one in gradients if one is not None)
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()
        if found.shape != self.shape:
            raise wrong_gradient_shape(found, self.shape)
        return with_strides(found, self.stride)


@dataclass(frozen=True)
class LayerGraphs:
    """Forward and backward of a layer as steps. Arguments: input tensors, then parameters, then buffers."""

    forward: LayerOperations
    """Returns the output's tensors, then what is saved; but what is saved of the arguments."""
    backward: LayerOperations
    """From what is saved and the gradients of the outputs that have one: the gradient of each input, then of
    the parameters in `parameters`."""
    saved_arguments: Sequence[int]
    """The numbers of the arguments that are saved."""
    output: Value
    """The layer's output, with other tensors."""
    requires_grad: Sequence[bool]
    """Of each tensor of the output."""
    output_gradients: Sequence[OutputGradient]
    """Of the output's tensors that have one."""
    inputs: int
    """The number of arguments that are tensors of the input."""
    parameters: Sequence[int]
    """The numbers of the layer's parameters whose gradients the backward returns, wholly or in part."""
    returns_tensor: bool
    """Whether the output is one tensor."""
    checks: Sequence[Callable[[], None]]
    """What each call runs first."""

    def run_forward(self, arguments: list[Tensor], call: LayerCall) -> tuple[list[Tensor], list[Tensor]]:
        """Return the output's tensors and what the backward reads; gradients are disabled."""
        for check in self.checks:
            check()
        saved = list(map(arguments.__getitem__, self.saved_arguments))
        made = self.forward.run(arguments, call)
        count = len(self.requires_grad)
        return made[:count], saved + made[count:]

    def run_backward(
        self, saved: list[Tensor], gradients: Sequence[Tensor | None], call: LayerCall
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, then of `parameters`; `gradients`: those of the outputs.

        Empties `saved`, so that a tensor's memory is free after its last use; gradients are disabled.
        """
        for one in self.output_gradients:
            saved.append(one.of(gradients))
        return self.backward.run(saved, call)


def trace_layer(
    layer: NamedLayer,
    value: Value,
    info: LayerInfo,
    mode: Recompute,
    *,
    generates: bool,
    on_meta: bool = False,
) -> LayerGraphs:
    """Return the graphs of `layer` for inputs like `value`; raises what torch raises where it cannot.

    `generates`: with generated code. `on_meta`: the graphs are those of a CPU, for tensors on the meta
    device. Nothing is computed, and nothing is communicated.
    """
    inputs, parameters = list_of_tensors(value), list(layer.module.parameters())
    function = _LayerFunction(layer, value, info)
    with COMPILER_LOCK, torch.enable_grad():
        with without_memory():
            arguments = [_like(one, "cpu" if on_meta else one.device) for one in (*inputs, *function.tensors)]
            with _tracing(layer):
                requires_grad = [one.requires_grad for one in function.outputs(arguments)]
        with _tracing(layer) as trace:
            graph = joint_graph(function, arguments, differentiates=any(requires_grad))
        if on_meta:
            move_to_meta(graph)
        joint = JointGraph.of(graph, len(arguments), len(requires_grad), len(inputs))
        numbers = range(len(inputs), len(inputs) + len(parameters))
        parts = divided(joint, numbers, mode, trace.gathers)
        given = list(joint.arguments)
        computed = [node for node in parts.saved if node not in given]
        saved = [node for node in parts.saved if node in given]
        returning = [number for number in numbers if parts.gradients[number] is not None]
        gradients = [*parts.gradients[: len(inputs)], *(parts.gradients[number] for number in returning)]
        results, begun = [*joint.results, *computed], [*saved, *computed, *joint.tangents]
        return LayerGraphs(
            steps_of(graph, parts.forward, given, results, trace, generates=generates),
            steps_of(graph, parts.backward, begun, gradients, trace, parts.terms, generates=generates),
            [given.index(node) for node in saved],
            map_tensors(lambda _: torch.empty(0), function.output),
            requires_grad,
            _output_gradients(requires_grad, joint.tangents),
            len(inputs),
            [number - len(inputs) for number in returning],
            isinstance(function.output, Tensor),
            trace.checks,
        )


def _output_gradients(requires_grad: Sequence[bool], tangents: Sequence[Node]) -> list[OutputGradient]:
    learning = [number for number, learns in enumerate(requires_grad) if learns]
    examples = map(example_of, tangents)
    return [
        OutputGradient(number, one.shape, one.stride(), one.dtype)
        for number, one in zip(learning, examples, strict=True)
    ]


class _LayerFunction:
    """A layer as a function of tensors: its inputs, then its parameters, then its buffers."""

    def __init__(self, layer: NamedLayer, value: Value, info: LayerInfo) -> None:
        """Run `layer` on inputs structured like `value`, with the tensors that are given."""
        self._run, self._value = _LayerRun(layer, info), value
        named = {**dict(self._run.named_parameters()), **dict(self._run.named_buffers())}
        self._names, self.tensors = list(named), list(named.values())
        self.output: Value = None
        """That of the latest call."""

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return clones of the output's tensors, since a function that is traced must not return a view."""
        return tuple(one.clone() for one in self.outputs(arguments))

    def outputs(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return the output's tensors."""
        count = len(arguments) - len(self._names)
        given = with_tensors(self._value, arguments[:count])
        tensors = dict(zip(self._names, arguments[count:], strict=True))
        self.output = torch.func.functional_call(self._run, tensors, (given,))
        return list_of_tensors(self.output)


class _LayerRun(nn.Module):
    """A layer as a stage runs it, with the sequence length that it is given."""

    def __init__(self, layer: NamedLayer, info: LayerInfo) -> None:
        super().__init__()
        self.module, self._layer, self._info = layer.module, layer, info

    def forward(self, value: Value) -> Value:
        """Return the layer's output; it may write to its input's clone."""
        given = map_tensors(torch.clone, value) if self._info.writes_input else value
        return self._layer.run(given, self._info.length)[0]


@contextmanager
def _tracing(layer: NamedLayer) -> Iterator[LayerTrace]:
    """Context in which collectives and masks of dropouts are recorded, in the trace that it gives."""
    trace = LayerTrace(names_of(layer.module))
    token = TRACE.set(trace)
    try:
        yield trace
    finally:
        TRACE.reset(token)


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a new tensor on `device` that is else like `tensor`, a leaf, in the current context."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)
