"""Runners of layers: each layer of a stage runs eagerly, eagerly with recomputation, or by compiled graphs.

A runner is a call, the same for all three: of a micro-batch's number, the layer's info, the part of the
sequences and the input. It returns the output and a `LayerRun`, whose backward is that of the layer alone;
or None, where autograd has recorded the layer in a graph, which may go on through the next layers. That
graph's run is an `EagerRun`.

    EagerLayer.forward                        output, None
    RecomputingLayer(EagerLayer.forward)      the same, and the layer runs again in the backward
    CompiledRunner                            output, CompiledRun; a layer without graphs: one of the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from plait.engine.compilation.compiled_layer import CompiledLayer
from plait.models.layers.layer_sequence import read_attributes, set_attributes
from plait.models.layers.shape_inference import LayerInfo, wrong_gradient_shape
from plait.models.layers.shared_inputs import Readers, join_linears
from plait.tensor.autograd.collected_gradients import add_found, put_back, set_aside
from plait.tensor.autograd.deferred_weight_gradients import made_by_linear
from plait.tensor.autograd.engine_calls import run_backward
from plait.tensor.autograd.joined_linears import JoinedLinears
from plait.tensor.autograd.weight_gradient_queue import NO_WEIGHTS, WeightGradientQueue
from plait.tensor.dropout import DropoutGenerator, names_of
from plait.tensor.layer_values import NamedLayer, Value, map_tensors
from plait.tensor.running_sequence import LocalSequence, running

Gradients: TypeAlias = list[Tensor | None]
"""One per tensor of a value, in the order of `tensors_of`; None for a tensor without a gradient."""


class LayerRun(Protocol):
    """Protocol of what is kept of a micro-batch's forward, of one layer or several, until their backward."""

    def backward(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the input's tensors from those of the output's; queue weight gradients."""

    def output_is_read(self) -> bool:
        """Return whether the backward may read the output, which must then not be written to."""


LayerRunner: TypeAlias = Callable[
    [int, LayerInfo, LocalSequence | None, Value], tuple[Value, LayerRun | None]
]


class EagerLayer:
    """A layer that runs eagerly, and what the layer has of its own, however it runs."""

    def __init__(
        self, layer: NamedLayer, queue: WeightGradientQueue, dropout: DropoutGenerator | None
    ) -> None:
        self.layer, self.queue, self.dropout = layer, queue, dropout
        self.parameters = list(layer.module.parameters())
        self.dropouts = names_of(layer.module)
        self.joined: list[JoinedLinears] = []
        """The linears that are one product."""
        self._readers: tuple[Readers, ...] = ()
        """From what `joined` was made."""
        self.before: dict[str, Any] | None = None
        """What counts the layer's runs, before the step."""

    def forward(
        self, microbatch: int, info: LayerInfo, sequence: LocalSequence | None, value: Value
    ) -> tuple[Value, None]:
        """Run the layer and return its output; a layer that recomputes calls this again in its backward."""
        layer, queue = self.layer, self.queue
        given = map_tensors(torch.clone, value) if info.writes_input else value
        if info.counting:  # the micro-batches of a step count once together
            if self.before is None:
                self.before = read_attributes(layer.module, info.counting)
            set_attributes(layer.module, self.before)
        # A recomputed layer runs within a backward, whose mode holds again afterwards.
        outside, queue.mode = queue.mode, NO_WEIGHTS
        try:
            if sequence is None and layer.run_on_parts is None and not self.dropouts:
                output = layer.module(given)  # the common case, kept cheap
            else:
                with self.contexts(microbatch, sequence):
                    output = layer.run(given, info.length)[0]
        finally:
            queue.mode = outside
            for joined in self.joined:
                joined.forget()
        return (self._without_parameters(output) if info.returns_parameter else output), None

    def join(self, readers: tuple[Readers, ...]) -> None:
        """Compute linears that read the same input as one product, from now on those of `readers`."""
        if readers != self._readers:
            for joined in self.joined:
                joined.release()
            self._readers = readers
            self.joined = join_linears(self.layer.module, readers, self.queue)

    def set_back(self) -> None:
        """Restore the layer's run counters to their values before the step."""
        if self.before is not None:
            set_attributes(self.layer.module, self.before)

    def contexts(self, microbatch: int, sequence: LocalSequence | None) -> ExitStack:
        """Return the contexts in which the layer runs: its dropout, and this rank's part of the sequences."""
        stack = ExitStack()
        if self.dropout and self.dropouts:
            stack.enter_context(self.dropout.running(microbatch, self.layer.path, self.dropouts))
        if sequence is not None:
            stack.enter_context(running(sequence))
        return stack

    def _without_parameters(self, output: Value) -> Value:
        """Return `output` with clones of parameters, whose memory may be freed before the next layer runs."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.parameters} - {0}
        return map_tensors(
            lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in own else tensor, output
        )


class CompiledRunner:
    """A layer that runs by its graphs; for inputs for which it has none, by another runner."""

    def __init__(self, compiled: CompiledLayer, layer: EagerLayer, other: LayerRunner) -> None:
        self.compiled, self.layer, self.other = compiled, layer, other

    def forward(
        self, microbatch: int, info: LayerInfo, sequence: LocalSequence | None, value: Value
    ) -> tuple[Value, LayerRun | None]:
        """Run the layer and return its output, whose tensors are leaves, and the run."""
        if sequence is None and not self.layer.dropouts:  # the common case, kept cheap
            made = self.compiled.forward(value, info)
        else:
            with self.layer.contexts(microbatch, sequence):
                made = self.compiled.forward(value, info, None if sequence is None else sequence.shape)
        return made or self.other(microbatch, info, sequence, value)


class GraphParameters:
    """The parameters of layers that share an autograd graph, by when their gradients are added to buffers.

    Those of biases and norms are added after the graph's backward, in one operation; where `W` adds all
    gradients, so are all of them. Else a matrix's is added at once, which frees it, unless its buffer is not
    written yet, and holds what it held before the step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], queue: WeightGradientQueue) -> None:
        self.queue = queue
        self.together = [one for one in parameters if queue.adds_late or one.dim() <= 1]
        self.matrices = [] if queue.adds_late else [one for one in parameters if one.dim() > 1]


class EagerRun:
    """The autograd graph of layers that ran together, from leaves, the first input, to the output."""

    def __init__(self, parameters: GraphParameters, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.parameters, self.inputs, self.outputs = parameters, inputs, outputs

    def backward(self, gradients: Gradients) -> Gradients:
        """Run the graph's backward, in which recomputation may run the layers again; see `LayerRun`."""
        queue, together = self.parameters.queue, self.parameters.together
        roots, seeds = _with_gradient(self.outputs, gradients)
        if roots:
            if queue.unwritten:
                late = [one for one in self.parameters.matrices if id(one) in queue.unwritten]
                together = [*together, *late]
            held = set_aside(together, queue)
            try:
                run_backward(roots, seeds)
            finally:
                parameters, found = put_back(held, queue)
            if queue.adds_late:
                queue.pending.insert(0, partial(add_found, parameters, found, queue))
            else:
                add_found(parameters, found, queue)
        return [tensor.grad for tensor in self.inputs]

    def output_is_read(self) -> bool:
        """Return whether the backward may read the output; see `LayerRun`."""
        return not all(made_by_linear(output) for output in self.outputs)


def _with_gradient(outputs: list[Tensor], gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have a gradient, and their gradients; skips frozen and unused outputs."""
    roots, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None or not output.requires_grad:
            continue
        if gradient.shape != output.shape:
            raise wrong_gradient_shape(gradient, output.shape)
        roots.append(output)
        seeds.append(gradient)
    return roots, seeds
