"""The graphs of a layer for inputs of one shape: traced, divided in forward and backward, cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.autograd.dropout import names_of
from plait.autograd.layer_trace import TRACE, LayerTrace
from plait.compilation.graph_division import JointGraph, divided
from plait.compilation.graph_steps import steps_of
from plait.compilation.steps import LayerCall, Steps
from plait.compilation.torch_compiler import COMPILER_LOCK, example_of, joint_graph, without_memory
from plait.layers.layer_sequence import NamedLayer
from plait.layers.nested import Value, list_of_tensors, map_tensors, with_tensors
from plait.layers.shape_inference import LayerInfo
from plait.plan import Recompute


@dataclass(frozen=True)
class LayerGraphs:
    """Forward and backward of a layer as steps. Arguments: input tensors, then parameters, then buffers."""

    forward: Steps
    """Returns the output's tensors, then what is saved; but what is saved of the arguments."""
    backward: Steps
    """From what is saved and the gradients of the outputs that have one: the gradient of each argument."""
    saved_arguments: Sequence[int]
    """The numbers of the arguments that are saved."""
    output: Value
    """The layer's output, with other tensors."""
    requires_grad: Sequence[bool]
    """Of each tensor of the output."""
    strides: Sequence[tuple[int, tuple[int, ...]]]
    """The number of each output that has a gradient, and the strides of that."""

    returns_tensor: bool
    """Whether the output is one tensor."""
    learns: bool
    """Whether any of the output's tensors requires a gradient."""

    def run_forward(self, arguments: Sequence[Tensor], call: LayerCall) -> tuple[list[Tensor], list[Tensor]]:
        """Return the output's tensors and what the backward reads; gradients are disabled."""
        # Detached, so that what is saved holds neither a gradient nor a graph.
        given = [*[one.detach() for one in arguments[: call.inputs]], *arguments[call.inputs :]]
        made: list[Any] = self.forward.run(given, call)
        count = len(self.requires_grad)
        outputs = [one.detach() for one in made[:count]]
        return outputs, [given[number] for number in self.saved_arguments] + made[count:]

    def run_backward(
        self, saved: Sequence[Tensor], gradients: Sequence[Tensor], call: LayerCall
    ) -> list[Tensor | None]:
        """Return the gradient of each argument but what is deferred; `gradients`: those of the outputs."""
        laid = []
        for number, stride in self.strides:
            one = gradients[number]
            laid.append(one if one.stride() == stride else _with_strides(one, stride))
        return self.backward.run([*saved, *laid], call)


def trace_layer(
    layer: NamedLayer, value: Value, info: LayerInfo, mode: Recompute, *, generates: bool
) -> LayerGraphs:
    """Return the graphs of `layer` for inputs like `value`; raises what torch raises where it cannot trace.

    Nothing is computed, and nothing is communicated.
    """
    inputs, parameters = list_of_tensors(value), list(layer.module.parameters())
    function = _LayerFunction(layer, value, info)
    with COMPILER_LOCK, torch.enable_grad():
        with without_memory():
            arguments = [_like(one) for one in (*inputs, *function.tensors)]
            with _tracing(layer):
                requires_grad = [one.requires_grad for one in function.outputs(arguments)]
        with _tracing(layer) as trace:
            graph = joint_graph(function, arguments, differentiates=any(requires_grad))
        joint = JointGraph.of(graph, len(arguments), len(requires_grad))
        parts = divided(joint, range(len(inputs), len(inputs) + len(parameters)), mode)
        given = list(joint.arguments)
        computed = [node for node in parts.saved if node not in given]
        saved = [node for node in parts.saved if node in given]
        learning = [number for number, learns in enumerate(requires_grad) if learns]
        results, begun = [*joint.results, *computed], [*saved, *computed, *joint.tangents]
        return LayerGraphs(
            steps_of(graph, parts.forward, given, results, trace, generates=generates),
            steps_of(graph, parts.backward, begun, parts.gradients, trace, parts.terms, generates=generates),
            [given.index(node) for node in saved],
            map_tensors(lambda _: torch.empty(0), function.output),
            requires_grad,
            [
                (number, example_of(node).stride())
                for number, node in zip(learning, joint.tangents, strict=True)
            ],
            isinstance(function.output, Tensor),
            bool(learning),
        )


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


def _like(tensor: Tensor) -> Tensor:
    """Return a new tensor like `tensor`, a leaf, in the current context."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _with_strides(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    laid = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return laid.copy_(gradient)
