"""Layers compiled to graphs: each distinct layer structure is traced once per input shape, with its backward.

F    the steps of the forward; its results, and what the backward reads
I    the steps of the backward: gradients of the input, of biases and norms; operands of weight gradients
W    the products of these operands, which the weight gradient queue adds to the parameters' buffers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from plait.engine.compilation.layer_graphs import LayerGraphs, trace_layer
from plait.engine.compilation.weight_terms import WeightTerms
from plait.errors import ModelError
from plait.models.layers.shape_inference import LayerInfo
from plait.plan.plan import Plan, Recompute
from plait.tensor.autograd.regather import Gather, Regathered
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import Dropout
from plait.tensor.layer_values import NamedLayer, Value, list_of_tensors, map_tensors, with_tensors

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
    on_meta: bool = False
    """Whether the graphs, those of a CPU, run on the meta device."""
    graphs: dict[Hashable, LayerGraphs | None] = field(default_factory=dict)
    """By structure, recompute mode and shapes of the input; None: such layers run eagerly."""

    @staticmethod
    def of(plan: Plan, queue: WeightGradientQueue) -> LayerCompiler | None:
        """Return the compiler of a plan; None where layers run eagerly."""
        if not plan.compile:
            return None
        return LayerCompiler(queue, plan.compile != "graphs", plan.compile == "where possible")

    @staticmethod
    def for_estimates(queue: WeightGradientQueue) -> LayerCompiler:
        """Return a compiler of layers on the meta device: graphs of a CPU, without generated code."""
        return LayerCompiler(queue, generates=False, falls_back=False, on_meta=True)

    def compiled(self, layer: NamedLayer, structure: Hashable, recompute: Recompute) -> CompiledLayer:
        """Return a layer of a stage as a compiled one; equal `structure`s have the same graphs."""
        return CompiledLayer(self, layer, structure, recompute)


class CompiledLayer:
    """A layer of a stage, run by its graphs."""

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

    def forward(
        self, value: Value, info: LayerInfo, sequence: Hashable = None
    ) -> tuple[Value, CompiledRun] | None:
        """Return the layer's output for `value`, whose tensors are leaves, and the run; None: run it eagerly.

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
        graphs = self._graphs.get(key)
        if graphs is None:
            if key not in self._graphs:
                self._graphs[key] = self._found(key, value, info)
            graphs = self._graphs[key]
            if graphs is None:
                return None
        run = CompiledRun(self, graphs)
        torch.set_grad_enabled(False)
        try:
            # Inputs and outputs are detached, since what is saved is to hold no gradient and need none.
            given = list(map(Tensor.detach, inputs))
            outputs, run.saved = graphs.run_forward([*given, *self._tensors], run)
            for number, learns in enumerate(graphs.requires_grad):
                if learns:
                    outputs[number] = outputs[number].detach().requires_grad_()
        finally:
            torch.set_grad_enabled(True)
        return outputs[0] if graphs.returns_tensor else with_tensors(graphs.output, outputs), run

    def _found(self, key: Hashable, value: Value, info: LayerInfo) -> LayerGraphs | None:
        """Return the graphs of the structure for these shapes: of an equal layer, or newly traced."""
        compiler = self._compiler
        whole_key = self._structure, self._recompute, key, torch.get_default_dtype()
        if whole_key not in compiler.graphs:
            try:
                if info.counting:
                    raise ModelError(f"each run changes {info.counting[0]}, which graphs would not do.")
                compiler.graphs[whole_key] = trace_layer(
                    self.layer,
                    value,
                    info,
                    self._recompute,
                    generates=compiler.generates,
                    on_meta=compiler.on_meta,
                )
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


class CompiledRun:
    """One micro-batch's run of a compiled layer, from its forward to its backward."""

    def __init__(self, layer: CompiledLayer, graphs: LayerGraphs) -> None:
        self.layer, self.graphs = layer, graphs
        self.saved: list[Tensor] = []
        """What the backward reads."""
        self._makers: dict[int, Callable[[], Tensor]] = {}
        """Of masks, by number: they make the same mask again."""

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the input's tensors from those of the output's.

        Queues what weight gradients are taken out of the backward. The others are added to their buffers, or
        their addition is queued, too, where `W` adds all.
        """
        graphs, queue = self.graphs, self.layer.queue
        for one in graphs.output_gradients:
            if gradients[one.number] is not None:
                break
        else:
            return [None] * graphs.inputs
        saved, self.saved = self.saved, []
        torch.set_grad_enabled(False)
        try:
            found = graphs.run_backward(saved, gradients, self)
            parameters = list(map(self.layer.parameters.__getitem__, graphs.parameters))
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

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of call `number` of the dropout `name`; asked again, the same mask."""
        if number not in self._makers:
            self._makers[number] = self.layer.dropouts[name].next_mask_maker(shape, device)
        return self._makers[number]()

    def dropout(self, name: str) -> Dropout:
        """Return the layer's dropout module `name`."""
        return self.layer.dropouts[name]

    def regathered(self, part: Tensor, gather: Gather) -> Regathered:
        """Return a tensor whose all-gather from the ranks' parts is repeated on first use.

        The all-gather starts now if the weight gradients follow at once.
        """
        queue = self.layer.queue
        found = queue.gathered.again(part, gather)
        if queue.mode.overlaps:
            found.start()
        return found

    def defer(self, terms: WeightTerms, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `terms`, parts of weight gradients, from `operands`.

        An output gradient that was gathered is gathered again, unless the weight gradients follow at once.
        """
        queue = self.layer.queue
        if queue.gathered.is_used:
            operands = [self._later(operand) for operand in operands]
        queue.add(partial(terms.add_to, queue, self.layer.parameters, operands))

    def _later(self, operand: Tensor | Regathered) -> Tensor | Regathered:
        queue = self.layer.queue
        if isinstance(operand, Regathered) or queue.mode.overlaps:
            return operand
        source = queue.gathered.of(operand)
        return operand if source is None else queue.gathered.again(*source)
