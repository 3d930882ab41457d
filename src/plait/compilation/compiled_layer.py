"""Layers as graphs: each distinct structure is traced once for each shape of its input, forward and backward.

F    the steps of the forward; its results, and what the backward reads
I    the steps of the backward: gradients of the input, of biases and norms; operands of weight gradients
W    the products of these operands, which the weight gradient queue adds to the parameters' buffers
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from plait.autograd.dropout import Dropout
from plait.autograd.engine_calls import apply_function
from plait.autograd.split_backward import refuse_other_orders
from plait.autograd.weight_gradient_queue import WeightGradientQueue
from plait.compilation.layer_graphs import LayerGraphs, trace_layer
from plait.compilation.weight_terms import WeightTerm
from plait.errors import ModelError
from plait.layers.layer_sequence import NamedLayer
from plait.layers.nested import Value, list_of_tensors, map_tensors, with_tensors
from plait.layers.shape_inference import LayerInfo
from plait.plan import Plan, Recompute

REASON_LENGTH = 300
"""Characters of torch's reason in an error's message; the whole is its cause."""


@dataclass(frozen=True)
class LayerCompiler:
    """Makes the compiled layers of a rank; those of equal structure share their graphs."""

    queue: WeightGradientQueue
    generates: bool
    """Whether TorchInductor generates code; else the graphs run as they are."""
    falls_back: bool
    """Whether a layer that cannot be compiled runs eagerly."""
    graphs: dict[Hashable, LayerGraphs] = field(default_factory=dict)
    """By structure, recompute mode and shapes of the input."""

    @staticmethod
    def of(plan: Plan, queue: WeightGradientQueue) -> LayerCompiler | None:
        """Return the compiler of a plan; None where layers run eagerly."""
        if not plan.compile:
            return None
        return LayerCompiler(queue, plan.compile != "graphs", plan.compile == "where possible")

    def compiled(self, layer: NamedLayer, structure: Hashable, recompute: Recompute) -> CompiledLayer:
        """Return a layer of a stage as a compiled one; equal `structure`s have the same graphs."""
        return CompiledLayer(self, layer, structure, recompute)


class CompiledLayer:
    """A layer of a stage, run by its graphs. Call it with gradients enabled."""

    def __init__(
        self, compiler: LayerCompiler, layer: NamedLayer, structure: Hashable, recompute: Recompute
    ) -> None:
        self.layer, self.queue = layer, compiler.queue
        self.parameters = list(layer.module.parameters())
        self._tensors = [*self.parameters, *layer.module.buffers()]
        self._compiler, self._structure, self._recompute = compiler, structure, recompute
        self.dropouts = {
            name: module for name, module in layer.module.named_modules() if isinstance(module, Dropout)
        }
        self._graphs: dict[Hashable, LayerGraphs | None] = {}
        """By the input's shapes; None: the layer runs eagerly."""

    def __call__(self, value: Value, info: LayerInfo, eagerly: Callable[[], Value]) -> Value:
        """Return the layer's output for `value`; `eagerly` runs the layer, if it cannot be compiled.

        The first call for a shape traces the layer. Raises ModelError with torch's reason where that fails.
        """
        if isinstance(value, Tensor):
            inputs, around = [value], ""
        else:  # what else the value holds goes into the graphs
            inputs, around = list_of_tensors(value), repr(map_tensors(lambda _: None, value))
        shapes = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in inputs]
        key: Hashable = (info.length, around, *shapes)
        graphs = self._graphs.get(key)
        if graphs is None:
            if key not in self._graphs:
                self._graphs[key] = self._found(key, value, info)
            graphs = self._graphs[key]
            if graphs is None:
                return eagerly()
        call, arguments = _LayerCall(self, len(inputs)), (*inputs, *self._tensors)
        if graphs.learns:
            outputs = apply_function(_CompiledRun, graphs, call, *arguments)
        else:
            with torch.no_grad():
                outputs, _ = graphs.run_forward(arguments, call)
        return outputs[0] if graphs.returns_tensor else with_tensors(graphs.output, outputs)

    def _found(self, key: Hashable, value: Value, info: LayerInfo) -> LayerGraphs | None:
        """Return the graphs of the structure for these shapes: of an equal layer, or newly traced."""
        compiler = self._compiler
        whole_key = self._structure, self._recompute, key, torch.get_default_dtype()
        if whole_key not in compiler.graphs:
            try:
                compiler.graphs[whole_key] = trace_layer(
                    self.layer, value, info, self._recompute, generates=compiler.generates
                )
            except Exception as error:
                if compiler.falls_back:
                    return None
                reason = shorten(str(error), REASON_LENGTH) or type(error).__name__
                raise ModelError(
                    f"the layer {self.layer.path!r} cannot be compiled, for torch says: {reason} Set "
                    "plan.compile to 'where possible', and such layers run eagerly, or to False."
                ) from error
        return compiler.graphs[whole_key]


class _LayerCall:
    """One call of a compiled layer."""

    def __init__(self, layer: CompiledLayer, inputs: int) -> None:
        self.layer, self.inputs = layer, inputs
        self._makers: dict[int, Callable[[], Tensor]] = {}
        """Of masks, by number: they make the same mask again."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`: the next one, or the same again."""
        if number not in self._makers:
            self._makers[number] = self.layer.dropouts[name].next_mask_maker(shape, device)
        return self._makers[number]()

    def defer(self, term: WeightTerm, operands: Sequence[Tensor]) -> None:
        """Queue the computation of `term`, a part of a weight gradient, from `operands`."""
        weight, queue = self.layer.parameters[term.parameter - self.inputs], self.layer.queue
        queue.add(partial(_add, queue, weight, term, operands))


def _add(queue: WeightGradientQueue, weight: Tensor, term: WeightTerm, operands: Sequence[Tensor]) -> None:
    term.add_to(queue.buffer_of(weight), operands)


class _CompiledRun(torch.autograd.Function):
    """Autograd function of a layer's graphs; queues what is taken out of the backward."""

    @staticmethod
    def forward(ctx: Any, graphs: LayerGraphs, call: _LayerCall, *arguments: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.saved = graphs.run_forward(arguments, call)
        ctx.graphs, ctx.call, ctx.ran = graphs, call, False
        if not all(graphs.requires_grad):
            pairs = zip(outputs, graphs.requires_grad, strict=True)
            ctx.mark_non_differentiable(*(one for one, learns in pairs if not learns))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_other_orders(ctx, "a compiled layer")
        saved, ctx.saved = ctx.saved, None
        return None, None, *ctx.graphs.run_backward(saved, gradients, ctx.call)
