"""Layers compiled to graphs: each distinct layer structure is traced once per input shape, with its backward.

F    the operations of the forward; its results, and what the backward reads
I    those of the backward: gradients of the input, of biases and norms; operands of weight gradients
W    the products of these operands, which the weight gradient queue adds to the parameters' buffers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.compilation.graphs_and_eager_operations import operations_of
from plait.engine.compilation.joint_graph_division import JointGraph, divided
from plait.engine.compilation.layer_call_state import LayerCall
from plait.engine.compilation.layer_operations import LayerOperations, with_strides
from plait.engine.compilation.torch_compiler import (
    COMPILER_LOCK,
    example_of,
    joint_graph,
    move_to_meta,
    without_memory,
)
from plait.errors import ModelError
from plait.models.layers.shape_inference import LayerInfo, wrong_gradient_shape
from plait.plan.plan import Recompute
from plait.tensor.autograd.eager_operations import TRACE, LayerTrace
from plait.tensor.autograd.float8_inputs import CastInputs
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors, with_tensors

REASON_LENGTH = 300
"""Characters of torch's reason in an error's message; the whole is its cause."""


@dataclass(frozen=True)
class LayerCompiler:
    """Makes the compiled layers of a rank; layers of equal structure share their graphs."""

    queue: WeightGradientQueue
    generates: bool
    """Whether TorchInductor generates code; else the graphs run as they are."""
    falls_back: bool
    """Whether a layer that cannot be compiled runs eagerly."""
    on_meta: bool = False
    """Whether the graphs, those of a CPU, run on the meta device."""
    graphs: dict[Hashable, LayerGraphs | None] = field(default_factory=dict)
    """By structure, recompute mode and shapes of the input; None: such layers run eagerly."""

    @staticmethod
    def for_estimates(queue: WeightGradientQueue) -> LayerCompiler:
        """Return a compiler for memory estimates: it traces layers on meta, and generates no code."""
        return LayerCompiler(queue, generates=False, falls_back=False, on_meta=True)

    def compiled(self, layer: NamedLayer, structure: Hashable, recompute: Recompute) -> CompiledLayer:
        """Return `layer` as one that is compiled at its first call; equal `structure`s share graphs."""
        return CompiledLayer(self, layer, structure, recompute)


class CompiledLayer:
    """A layer of a stage whose forward and backward run as compiled graphs."""

    def __init__(
        self, compiler: LayerCompiler, layer: NamedLayer, structure: Hashable, recompute: Recompute
    ) -> None:
        self.layer, self.queue = layer, compiler.queue
        self.parameters = list(layer.module.parameters())
        self._tensors = [*self.parameters, *layer.module.buffers()]
        self._compiler, self._structure, self._recompute = compiler, structure, recompute
        self.modules = dict(layer.module.named_modules())
        self._graphs: dict[Hashable, LayerGraphs | None] = {}
        """By the input's shapes; None: the layer runs eagerly."""

    def forward(
        self, value: Value, info: LayerInfo, sequence: Hashable = None
    ) -> tuple[Value, CompiledRun] | None:
        """Return the output, as leaf tensors, and the run for its backward; None where it must run eagerly.

        `sequence`: the `shape` of the running sequence. The first call for a shape traces the layer. Raises
        ModelError with torch's reason where that fails.
        """
        if isinstance(value, Tensor):  # the common case, kept cheap
            inputs = [value]
            kind = value.shape, value.stride(), value.dtype, value.requires_grad
            key: Hashable = (info.length, sequence, *kind)
        else:  # what else the value holds goes into the graphs
            inputs = list_of_tensors(value)
            shapes = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in inputs]
            key = (info.length, sequence, repr(map_tensors(lambda _: None, value)), *shapes)
        if key not in self._graphs:
            self._graphs[key] = self._found(key, value, info)
        graphs = self._graphs[key]
        if graphs is None:
            return None
        run = CompiledRun(self.queue, self.parameters, self.modules, graphs)
        torch.set_grad_enabled(False)
        try:
            for check in graphs.checks:
                check()
            # Inputs and outputs are detached, since what is saved is to hold no gradient and need none.
            arguments = [*map(Tensor.detach, inputs), *self._tensors]
            saved = list(map(arguments.__getitem__, graphs.saved_arguments))
            results, count = graphs.forward.run(arguments, run), len(graphs.requires_grad)
            outputs, run.saved = results[:count], saved + results[count:]
            for number, learns in enumerate(graphs.requires_grad):
                if learns:
                    outputs[number] = outputs[number].detach().requires_grad_()
        finally:
            torch.set_grad_enabled(True)
        output = graphs.output
        return outputs[0] if isinstance(output, Tensor) else with_tensors(output, outputs), run

    def _found(self, key: Hashable, value: Value, info: LayerInfo) -> LayerGraphs | None:
        """Return the graphs of the structure for these shapes: of an equal layer, or newly traced."""
        compiler = self._compiler
        whole_key = self._structure, self._recompute, key, torch.get_default_dtype()
        if whole_key not in compiler.graphs:
            try:
                if info.counting:
                    raise ModelError(f"each run changes {info.counting[0]}, which graphs would not do.")
                compiler.graphs[whole_key] = trace_layer(self.layer, value, info, self._recompute, compiler)
            except Exception as error:
                reason = shorten(str(error), REASON_LENGTH) or type(error).__name__
                says = "for " if isinstance(error, ModelError) else "for torch says: "
                cannot = f"the layer {self.layer.path!r} cannot be compiled, {says}{reason}"
                if not compiler.falls_back:
                    raise ModelError(
                        f"{cannot} Set plan.compile to 'where possible', and such layers run eagerly, or to "
                        "False."
                    ) from error
                compiler.graphs[whole_key] = None
                warnings.warn(f"{cannot} It runs eagerly, and so do layers like it.", stacklevel=1)
        return compiler.graphs[whole_key]


@dataclass(eq=False)
class CompiledRun(LayerCall):
    """One micro-batch's run of a compiled layer, from its forward to its backward."""

    graphs: LayerGraphs
    saved: list[Tensor] = field(default_factory=list)
    """What the backward reads."""

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the input's tensors from the output's; add or queue those of parameters.

        Queues what weight gradients are taken out of the backward. The others are added to their buffers, or
        their addition is queued, too, where `W` adds all.
        """
        graphs, queue = self.graphs, self.queue
        for one in graphs.output_gradients:
            if gradients[one.number] is not None:
                break
        else:
            return [None] * graphs.inputs
        saved, self.saved = self.saved, []
        torch.set_grad_enabled(False)
        try:
            for one in graphs.output_gradients:
                saved.append(one.of(gradients))
            found = graphs.backward.run(saved, self)
            parameters = list(map(self.parameters.__getitem__, graphs.parameters))
            computed: Any = found[graphs.inputs :]  # none of them is None
            if queue.adds_late:
                queue.add(partial(queue.add_found, parameters, computed))
            else:
                queue.add_found(parameters, computed)
        finally:
            torch.set_grad_enabled(True)
        return found[: graphs.inputs]

    def output_is_read(self) -> bool:
        """Return True: the backward may read the output, which must then not be written to."""
        return True


@dataclass(frozen=True)
class OutputGradient:
    """Shape, strides and dtype that the traced backward expects of the gradient of one output tensor."""

    number: int
    """Of the tensor in the output."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return this output's gradient from those of all outputs, in the traced strides; zeros if None."""
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
    """Compiled forward and backward of a layer; its arguments: input tensors, parameters, buffers."""

    forward: LayerOperations
    """Returns the output's tensors, then what is saved; but what is saved of the arguments."""
    backward: LayerOperations
    """From what is saved and the gradients `output_gradients`: the gradient of each input, then of the
    parameters `parameters`."""
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
    checks: Sequence[Callable[[], None]]
    """What each forward runs first."""


def trace_layer(
    layer: NamedLayer, value: Value, info: LayerInfo, mode: Recompute, compiler: LayerCompiler
) -> LayerGraphs:
    """Trace `layer` for inputs like `value`, and return its graphs; raises torch's error if it cannot.

    Nothing is computed, and nothing is communicated.
    """
    generates, on_meta = compiler.generates, compiler.on_meta
    inputs, parameters = list_of_tensors(value), list(layer.module.parameters())
    function = _LayerFunction(layer, value, info, compiler.queue.inputs)
    with COMPILER_LOCK, torch.enable_grad():
        with without_memory():
            arguments = [_like(one, "cpu" if on_meta else one.device) for one in (*inputs, *function.tensors)]
            with _tracing(layer, compiler.queue.inputs):
                requires_grad = [one.requires_grad for one in function.outputs(arguments)]
        with _tracing(layer, compiler.queue.inputs) as trace:
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
        learning = [number for number, learns in enumerate(requires_grad) if learns]
        tangents = zip(learning, map(example_of, joint.tangents), strict=True)
        results, begun = [*joint.results, *computed], [*saved, *computed, *joint.tangents]
        return LayerGraphs(
            operations_of(graph, parts.forward, given, results, trace, generates=generates),
            operations_of(graph, parts.backward, begun, gradients, trace, parts.terms, generates=generates),
            [given.index(node) for node in saved],
            map_tensors(lambda _: torch.empty(0), function.output),
            requires_grad,
            [OutputGradient(number, one.shape, one.stride(), one.dtype) for number, one in tangents],
            len(inputs),
            [number - len(inputs) for number in returning],
            trace.checks,
        )


class _LayerFunction:
    """A layer as a function of tensors: its inputs, then its parameters, then its buffers."""

    def __init__(self, layer: NamedLayer, value: Value, info: LayerInfo, inputs: CastInputs) -> None:
        """Run `layer` on inputs structured like `value`, with the tensors that are given.

        `inputs`: the queue's casts.
        """
        self._run, self._value = _LayerRun(layer, info, inputs), value
        named = {**dict(self._run.named_parameters()), **dict(self._run.named_buffers())}
        self._names, self.tensors = list(named), list(named.values())
        self.output: Value = None
        """That of the latest call."""

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return clones of the output's tensors, since a function that is traced must not return a view."""
        return tuple(one.clone() for one in self.outputs(arguments))

    def outputs(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run the layer on a flat list of arguments, and return its output's tensors."""
        count = len(arguments) - len(self._names)
        given = with_tensors(self._value, arguments[:count])
        tensors = dict(zip(self._names, arguments[count:], strict=True))
        self.output = torch.func.functional_call(self._run, tensors, (given,))
        return list_of_tensors(self.output)


class _LayerRun(nn.Module):
    """A layer as a stage runs it, with the sequence length that it is given."""

    def __init__(self, layer: NamedLayer, info: LayerInfo, inputs: CastInputs) -> None:
        super().__init__()
        self.module, self._layer, self._info, self._inputs = layer.module, layer, info, inputs

    def forward(self, value: Value) -> Value:
        """Return the layer's output; if the layer writes to its input, it is given a copy."""
        given = map_tensors(torch.clone, value) if self._info.writes_input else value
        self._inputs.begin(self._info.regions_in_float8)
        return self._layer.run(given, self._info.length)[0]


@contextmanager
def _tracing(layer: NamedLayer, inputs: CastInputs) -> Iterator[LayerTrace]:
    """Context that records calls made outside of graphs, in the `LayerTrace` that it yields.

    `inputs`: the queue's casts, which forgets those of the trace.
    """
    trace = LayerTrace({id(module): name for name, module in layer.module.named_modules()})
    token = TRACE.set(trace)
    try:
        yield trace
    finally:
        TRACE.reset(token)
        inputs.forget()


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a new tensor on `device` that is else like `tensor`, a leaf, in the current context."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)
