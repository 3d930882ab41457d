"""A stage: consecutive layers, run one at a time, forward and backward.

The autograd graph is cut at each layer boundary. Per micro-batch and layer a stage holds a `Run`: the
layer's input (a leaf), its output (the root of a small graph) and, between `I` and `W`, the weight work.

    forward:   leaf → layer → root, cut → next leaf
    I:         gradient of the root → gradient of the leaf = gradient of the previous root
    W:         the weight work that I left behind
    B:         both, layer by layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.autograd.deferred import made_by_linear
from plait.autograd.dropout import DropoutGenerator, names_of
from plait.autograd.weight_queue import WeightGradientQueue, WeightWork
from plait.errors import ModelError
from plait.layers.layer_sequence import NamedLayer
from plait.layers.nested import Value, leaf_of, map_tensors, tensors_of
from plait.layers.shape_inference import LayerInfo
from plait.pipeline.recompute import Recomputation
from plait.plan import Recompute

Gradients = list[Tensor | None]
"""One per tensor of a value, in the order of `tensors_of`; none where no gradient flows."""


@dataclass
class Run:
    """One layer's forward of one micro-batch, until its backward is done."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    work: list[WeightWork] = field(default_factory=list)


@dataclass
class Stage:
    """Consecutive layers of the model, and what their micro-batches in flight hold."""

    number: int
    layers: Sequence[NamedLayer]
    queue: WeightGradientQueue
    infos: Sequence[Sequence[LayerInfo]] = ()
    """Per micro-batch, then per layer."""
    adds_late: bool = False
    """Whether `W` adds all weight gradients, also those that `I` has computed with the layer's backward."""
    recompute: Sequence[Recompute] = ()
    """How much of each layer's activations is made again in its backward; nothing, if it does not say."""
    dropout: DropoutGenerator | None = None
    """What dropouts in the layers draw by."""
    input_gradients: bool = False
    """Whether a stage fed by the batch collects the gradient of its floating-point input."""

    values: dict[int, Value] = field(default_factory=dict)
    """Per micro-batch: what flows forward now, the input of the next layer to run."""
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """Per micro-batch: what flows backward now."""
    runs: dict[tuple[int, int], Run] = field(default_factory=dict)
    """Per (micro-batch, layer)."""

    def __post_init__(self) -> None:
        modes: Sequence[Recompute] = self.recompute or ["none"] * len(self.layers)
        self._recomputations = [Recomputation(mode, self.queue) for mode in modes]
        self._dropouts = [names_of(layer.module) for layer in self.layers]

    def feed(self, microbatch: int, value: Value) -> None:
        """Give the first layer's input. The tensors are leaves already (see `leaf_of`)."""
        self.values[microbatch] = value

    def seed(self, microbatch: int, gradients: Gradients) -> None:
        """Give the gradients of the last layer's output."""
        self.gradients[microbatch] = gradients

    def forward(self, microbatch: int, layer: int) -> None:
        """Run one layer on what flows, and let its output flow on, cut off from the graph."""
        value = self.values.pop(microbatch)
        info = self.infos[microbatch][layer]
        with self._named(microbatch, layer):
            run = partial(_run, self.layers[layer], info, partial(self._drawing, microbatch, layer))
            output = self._recomputations[layer](run, value)
            info.check(output, self.layers[layer].path)
        if torch.is_grad_enabled():
            self.runs[microbatch, layer] = Run(list(tensors_of(value)), list(tensors_of(output)))
        self.values[microbatch] = map_tensors(lambda tensor: leaf_of(tensor, tensor.requires_grad), output)

    def backward_input(self, microbatch: int, layer: int) -> None:
        """Turn the gradient of the layer's output into that of its input; keep the weight work."""
        run = self.runs[microbatch, layer]
        roots, seeds = _with_gradient(run.outputs, self.gradients.pop(microbatch))
        computed: list[WeightWork] = []
        if roots:
            parameters = self.layers[layer].module.parameters() if self.adds_late else ()
            with self._named(microbatch, layer), _set_aside(parameters, computed, self.queue):
                torch.autograd.backward(roots, seeds)
        run.work = [*computed, *self.queue.take()]
        self.gradients[microbatch] = [tensor.grad for tensor in run.inputs]
        # From here on only what the weight work itself holds stays alive.
        run.inputs, run.outputs = [], []

    def backward_weight(self, microbatch: int, layer: int) -> None:
        """Add the layer's weight gradients to their buffers, and forget the run."""
        with torch.no_grad():
            for work in self.runs.pop((microbatch, layer)).work:
                work()

    def backward(self, microbatch: int, layer: int) -> None:
        """Both at once: weight work may be done while the input's gradient waits for other ranks."""
        with self.queue.overlapping():
            self.backward_input(microbatch, layer)
        self.backward_weight(microbatch, layer)

    def take_output(self, microbatch: int) -> Value:
        """The last layer's output (leaves), once."""
        return self.values.pop(microbatch)

    def output_is_read(self, microbatch: int) -> bool:
        """Whether the last layer's backward may look at its output, so that nobody may write to that."""
        run = self.runs.get((microbatch, len(self.layers) - 1))
        return run is not None and not all(made_by_linear(output) for output in run.outputs)

    def take_gradients(self, microbatch: int) -> Gradients:
        """The gradients of the first layer's input, once."""
        return self.gradients.pop(microbatch)

    def clear(self) -> None:
        """Forget every micro-batch in flight, after an exception in the middle of a step."""
        self.queue.take()
        for held in (self.values, self.gradients, self.runs):
            held.clear()

    def _drawing(self, microbatch: int, layer: int) -> AbstractContextManager[None]:
        """Around each run of a layer, the second as the first."""
        if self.dropout is None or not self._dropouts[layer]:
            return nullcontext()
        return self.dropout.running(microbatch, self.layers[layer].path, self._dropouts[layer])

    def _named(self, microbatch: int, layer: int) -> Any:
        return _Named(f"stage {self.number}, micro-batch {microbatch}, layer {self.layers[layer].path!r}")


def _run(
    layer: NamedLayer, info: LayerInfo, drawing: Callable[[], AbstractContextManager[None]], value: Value
) -> Value:
    """What a layer gives; a layer that writes to its input writes to a copy."""
    given = map_tensors(torch.clone, value) if info.writes_input else value
    with drawing():
        output, _ = layer.run(given, info.length)
        return _not_lent(layer.module, output)


def _not_lent(module: nn.Module, output: Value) -> Value:
    """`output`, copied where it lies in a parameter of the layer: that may be gone when the next runs."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()} - {0}
    return map_tensors(
        lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in own else tensor, output
    )


def _with_gradient(outputs: list[Tensor], gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a gradient flows into, with it. A frozen or unused output takes no part."""
    roots, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None or not output.requires_grad:
            continue
        if gradient.shape != output.shape:
            raise ModelError(
                f"a gradient of shape {list(gradient.shape)} came back for an output of {list(output.shape)}."
            )
        roots.append(output)
        seeds.append(gradient)
    return roots, seeds


@contextmanager
def _set_aside(
    parameters: Iterable[nn.Parameter], work: list[WeightWork], queue: WeightGradientQueue
) -> Iterator[None]:
    """Let a backward leave the weight gradients that it computes to `work`, which adds them."""
    buffers = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, buffer in buffers:
        queue.buffers[id(parameter)], parameter.grad = buffer, None
    try:
        yield
    finally:
        queue.buffers.clear()
        for parameter, buffer in buffers:
            if parameter.grad is not None:
                work.append(partial(buffer.add_, parameter.grad))
            parameter.grad = buffer


class _Named:
    """Says in which layer an exception happened, without changing its type."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"in {self.place}")
