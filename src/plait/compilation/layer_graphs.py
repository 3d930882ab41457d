"""The graphs of a layer for one shape of its input: traced, divided into forward and backward, cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.autograd.dropout import names_of
from plait.autograd.layer_trace import TRACE, LayerTrace
from plait.compilation.graph_steps import LayerCall, Steps, steps_of
from plait.compilation.partition import JointGraph, partition
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
    strides: Sequence[tuple[int, ...]]
    """Of the gradients that the backward is given."""

    @property
    def returns_tensor(self) -> bool:
        """Whether the output is one tensor."""
        return isinstance(self.output, Tensor)

    def run_forward(self, arguments: Sequence[Tensor], call: LayerCall) -> tuple[list[Tensor], list[Tensor]]:
        """Return the output's tensors and what the backward reads; gradients are disabled."""
        # Detached, so that what is saved holds neither a gradient nor a graph.
        given = [one if isinstance(one, nn.Parameter) else one.detach() for one in arguments]
        made: list[Any] = self.forward.run(given, call)
        count = len(self.requires_grad)
        outputs = [one.detach() for one in made[:count]]
        return outputs, [given[number] for number in self.saved_arguments] + made[count:]

    def run_backward(
        self, saved: Sequence[Tensor], gradients: Sequence[Tensor], call: LayerCall
    ) -> list[Tensor | None]:
        """Return the gradient of each argument but what is deferred; `gradients`: those of the outputs."""
        wanted = [one for one, learns in zip(gradients, self.requires_grad, strict=True) if learns]
        laid = [
            one if one.stride() == stride else _with_strides(one, stride)
            for one, stride in zip(wanted, self.strides, strict=True)
        ]
        return self.backward.run([*saved, *laid], call)


def trace_layer(
    layer: NamedLayer, value: Value, info: LayerInfo, mode: Recompute, *, generates: bool
) -> LayerGraphs:
    """Return the graphs of `layer` for inputs like `value`; raises what torch raises where it cannot trace.

    Nothing is computed, and nothing is communicated.
    """
    module = layer.module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    inputs = list_of_tensors(value)
    numbers = range(len(inputs), len(inputs) + len(list(module.parameters())))
    run, names = _LayerRun(layer, info), names_of(module)
    made, clones = list[Value](), list[bool]()

    def function(*arguments: Tensor) -> tuple[Tensor, ...]:
        replaced = zip(tensors, arguments[len(inputs) :], strict=True)
        given = with_tensors(value, arguments[: len(inputs)])
        output = torch.func.functional_call(run, {f"module.{name}": one for name, one in replaced}, (given,))
        made.append(output)
        outputs = list_of_tensors(output)
        if not clones:
            clones.extend(_apart(outputs, arguments))
        return tuple(one.clone() if shares else one for one, shares in zip(outputs, clones, strict=True))

    with COMPILER_LOCK, torch.enable_grad():
        with without_memory():
            arguments = [_like(one) for one in (*inputs, *tensors.values())]
            with _tracing(LayerTrace(names)):
                requires_grad = [one.requires_grad for one in function(*arguments)]
        with _tracing(LayerTrace(names)) as trace:
            graph = joint_graph(function, arguments, differentiates=any(requires_grad))
        joint = JointGraph.of(graph, len(arguments), clones)
        parts = partition(joint, numbers, mode)
        given = list(joint.arguments)
        computed = [node for node in parts.saved if node not in given]
        saved = [node for node in parts.saved if node in given]
        forward = [*joint.results, *computed]
        begun = [*saved, *computed, *joint.tangents]
        return LayerGraphs(
            steps_of(graph, parts.forward, given, forward, trace, generates=generates),
            steps_of(graph, parts.backward, begun, parts.gradients, trace, parts.terms, generates=generates),
            [given.index(node) for node in saved],
            map_tensors(lambda _: torch.empty(0), made[0]),
            requires_grad,
            [example_of(node).stride() for node in joint.tangents],
        )


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
def _tracing(trace: LayerTrace) -> Iterator[LayerTrace]:
    token = TRACE.set(trace)
    try:
        yield trace
    finally:
        TRACE.reset(token)


def _like(tensor: Tensor) -> Tensor:
    """Return a new tensor like `tensor`, a leaf, in the current context."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _apart(outputs: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[bool]:
    """Return of each output whether it is to be cloned in the trace, which must return no view."""
    memory = {id(one.untyped_storage()) for one in arguments}
    clones = []
    for one in outputs:
        clones.append(one._is_view() or id(one.untyped_storage()) in memory)
        memory.add(id(one.untyped_storage()))
    return clones


def _with_strides(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    laid = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return laid.copy_(gradient)
