"""A stage: consecutive layers, run one or several at a time, forward and backward.

The autograd graph is cut between layers that run one at a time: there parameters may be gathered, freed and
reduced. Layers that run together share a graph, which costs the host less. Per micro-batch and graph a stage
holds a `LayerRun`: the first layer's input (a leaf), the last one's output (the root of the graph) and,
between `I` and `W`, the weight gradients that are still to be computed.

            values[m]                                                        values[m]
    F   ──①──→ leaf ────────→ layer ─────→ … ─────→ layer ────→ root ──②──→ detached, the next leaf
    I          its .grad ←─── layer ←──③── … ←───── layer ←─── seed ←────── gradients[m]
            gradients[m]        │                     │
    W                           └──④── runs[m].work ──┘ ─────→ .grad of the weights

    ①  a micro-batch's input enters: a leaf, whose gradient the stage before is to get
    ②  the graph is cut: what comes after the root has a graph of its own
    ③  I: the backward of one graph, from the gradient of its root to that of its leaf; what it computes of
       biases and norms is added at its end
    ④  W: the products that I has queued are computed, and added to the buffers of the weights
    B  is ③ and ④, graph by graph
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.compilation.compiled_layer import CompiledLayer, CompiledRun
from plait.engine.pipeline.recompute import Run, recomputing
from plait.models.layers.layer_sequence import read_attributes, set_attributes
from plait.models.layers.shape_inference import LayerInfo, wrong_gradient_shape
from plait.models.layers.shared_inputs import Readers, join_linears
from plait.plan.plan import Recompute
from plait.tensor.autograd.collected_gradients import add_found, put_back, set_aside
from plait.tensor.autograd.deferred_weight_gradients import made_by_linear
from plait.tensor.autograd.engine_calls import run_backward
from plait.tensor.autograd.joined_linears import JoinedLinears
from plait.tensor.autograd.weight_gradient_queue import (
    INPUT_ONLY,
    NO_WEIGHTS,
    WEIGHTS_AT_ONCE,
    WEIGHTS_NEXT,
    WeightGradientQueue,
    WeightWork,
)
from plait.tensor.dropout import DropoutGenerator, names_of
from plait.tensor.layer_values import NamedLayer, Value, detached, list_of_tensors, map_tensors
from plait.tensor.running_sequence import LocalSequence, running

Gradients = list[Tensor | None]
"""One per tensor of a value, in the order of `tensors_of`; None for a tensor without a gradient."""


@dataclass
class LayerRun:
    """Tensors of one graph's forward of one micro-batch, kept until its backward has run."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    last: int
    """The number of the last layer."""
    compiled: CompiledRun | None = None
    """Runs the backward of a compiled layer, whose inputs and outputs are not needed."""
    work: list[WeightWork] = field(default_factory=list)


@dataclass
class Stage:
    """Consecutive layers of the model, and the state of their unfinished micro-batches."""

    number: int
    layers: Sequence[NamedLayer]
    queue: WeightGradientQueue
    infos: Sequence[Sequence[LayerInfo]] = ()
    """Per micro-batch, then per layer."""
    adds_late: bool = False
    """Whether `W` adds all weight gradients, also those that `I` has computed with the layer's backward."""
    recompute: Sequence[Recompute] = ()
    """How much of each layer's activations is computed again in its backward; empty: none of them."""
    dropout: DropoutGenerator | None = None
    """The random numbers of the layers' dropouts."""
    sequences: Sequence[LocalSequence | None] = ()
    """Per micro-batch, this rank's part of its sequences; None where they are whole."""

    values: dict[int, Value] = field(default_factory=dict)
    """Per micro-batch: the current activation, input of the next layer to run, whose tensors are leaves."""
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """Per micro-batch: the gradients of the activation that the backward has reached."""
    runs: dict[tuple[int, int], LayerRun] = field(default_factory=dict)
    """Per (micro-batch, first layer)."""
    starts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Per layer, the values before the step of what counts its runs."""

    def __post_init__(self) -> None:
        modes: Sequence[Recompute] = self.recompute or ["none"] * len(self.layers)
        self.compiled: Sequence[CompiledLayer] = ()
        """For each layer, if layers are compiled."""
        self._parameters = [list(layer.module.parameters()) for layer in self.layers]
        self._training_runs: list[Run] = [
            recomputing(mode, self._run, each) for mode, each in zip(modes, self._parameters, strict=True)
        ]
        users = Counter(id(parameter) for each in self._parameters for parameter in each)
        self.sharing = {
            number
            for number, each in enumerate(self._parameters)
            if any(users[id(parameter)] > 1 for parameter in each)
        }
        """The layers that share parameters with others of the stage."""
        self._together: dict[tuple[int, int], tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        """By first and last layer of a graph, the parameters added together, and its matrices."""
        self._dropouts = [names_of(layer.module) for layer in self.layers]
        self._joined: list[list[JoinedLinears]] = [[] for _ in self.layers]
        """Per layer, the linears that are one product."""
        self._readers: list[tuple[Readers, ...]] = [() for _ in self.layers]
        """Per layer, from what `_joined` was made."""
        if self.infos:
            self.expect(self.infos)

    def expect(self, infos: Sequence[Sequence[LayerInfo]]) -> None:
        """Prepare for micro-batches of shapes `infos`: join linears that read the same input in all of them.

        Where sequences are cut, keys and values are sent while queries are computed: there none are joined.
        """
        self.infos = infos
        sends_keys = any(one is not None and one.group.size > 1 for one in self.sequences)
        for number, layer in enumerate(self.layers):
            each = [one[number].readers for one in infos]
            common = (one for one in each[0] if all(one in other for other in each[1:]))
            readers = () if sends_keys else tuple(common)
            if readers != self._readers[number]:
                for joined in self._joined[number]:
                    joined.release()
                self._readers[number] = readers
                self._joined[number] = join_linears(layer.module, readers, self.queue)

    def begin(self) -> None:
        """Begin a step: refresh views of parameters, whose memory may have changed since the last step."""
        self.starts.clear()
        for each in self._joined:
            for joined in each:
                joined.begin_step()

    def run_compiled(self, layers: Sequence[CompiledLayer]) -> None:
        """Run the stage's layers as compiled graphs in training from now on; `layers` has one for each."""
        self.compiled = layers

    def forward(self, microbatch: int, layer: int, last: int | None = None) -> None:
        """Run one layer on the micro-batch's current activation, or those up to `last`, in one graph.

        Stores the detached output.
        """
        value, last = self.values.pop(microbatch), layer if last is None else last  # ①
        trains = torch.is_grad_enabled()
        inputs = list_of_tensors(value) if trains else []
        for number in range(layer, last + 1):
            try:
                if trains and self.compiled and self._run_compiled(microbatch, number, value):
                    return  # compiled layers run one at a time
                value = (self._training_runs[number] if trains else self._run)(microbatch, number, value)
                self.infos[microbatch][number].check(value, self.layers[number].path)
            except Exception as error:
                self._add_note(error, microbatch, number, number)
                raise
        if trains:
            self.runs[microbatch, layer] = LayerRun(inputs, list_of_tensors(value), last)
        self.values[microbatch] = detached(value)  # ②

    def backward_input(self, microbatch: int, layer: int) -> None:
        """Compute the gradient of a layer's input from that of its output; defer its weight gradients.

        `layer`: the first of those that ran together, here and in `backward_weight` and `backward`.
        """
        run, given = self.runs[microbatch, layer], self.gradients.pop(microbatch)
        computed: list[WeightWork] = []
        try:
            sequence = self.sequences[microbatch] if self.sequences else None
            if run.compiled is not None and sequence is None:
                gradients = run.compiled.backward(given, adds_late=self.adds_late)
            elif run.compiled is not None:
                with running(sequence):
                    gradients = run.compiled.backward(given, adds_late=self.adds_late)
            else:
                roots, seeds = _with_gradient(run.outputs, given)
                if roots:
                    self._run_backward(roots, seeds, sequence, layer, run.last, computed)  # ③
                gradients = [tensor.grad for tensor in run.inputs]
        except Exception as error:
            self._add_note(error, microbatch, layer, run.last)
            raise
        # From here on only what the weight work itself holds stays alive.
        run.inputs, run.outputs, run.compiled = [], [], None
        run.work = [*computed, *self.queue.take()]
        self.gradients[microbatch] = gradients

    def backward_weight(self, microbatch: int, layer: int) -> None:
        """Compute the layer's deferred weight gradients and add them to `.grad`; discard its `LayerRun`."""
        for work in self.runs.pop((microbatch, layer)).work:
            work()  # ④

    def backward(self, microbatch: int, layer: int) -> None:
        """Compute input and weight gradients; the latter may overlap the former's reduction over `tp`.

        Of layers that ran together weight gradients are computed as they come: else what all of them need
        would stay until the last one.
        """
        is_alone = self.runs[microbatch, layer].last == layer
        self.queue.mode = WEIGHTS_NEXT if is_alone else WEIGHTS_AT_ONCE
        try:
            self.backward_input(microbatch, layer)
        finally:
            self.queue.mode = INPUT_ONLY
        self.backward_weight(microbatch, layer)

    def output_is_read(self, microbatch: int) -> bool:
        """Return whether the last layer's backward may read its output, which must then not be written to."""
        last = len(self.layers) - 1
        runs = [run for (number, _), run in self.runs.items() if number == microbatch and run.last == last]
        return any(
            run.compiled is not None or not all(made_by_linear(output) for output in run.outputs)
            for run in runs
        )

    def clear(self) -> None:
        """Discard every unfinished micro-batch, after an exception within a step."""
        self.queue.take()
        self.set_back()
        for held in (self.values, self.gradients, self.runs, self.starts):
            held.clear()

    def set_back(self) -> None:
        """Restore the layers' run counters to their values before the step."""
        for layer, before in self.starts.items():
            set_attributes(self.layers[layer].module, before)

    def _run(self, microbatch: int, layer: int, value: Value) -> Value:
        """Run one layer and return its output; a layer that recomputes calls this again in its backward."""
        named, info, queue = self.layers[layer], self.infos[microbatch][layer], self.queue
        given = map_tensors(torch.clone, value) if info.writes_input else value
        if info.counting:
            self._restart(layer, info.counting)
        # A recomputed layer runs within a backward, whose mode holds again afterwards.
        outside, queue.mode = queue.mode, NO_WEIGHTS
        try:
            sequence = self.sequences[microbatch] if self.sequences else None
            if sequence is None and named.run_on_pieces is None and not self._dropouts[layer]:
                output = named.module(given)  # the common case, kept cheap
            else:
                with self._forward_contexts(sequence, microbatch, layer):
                    output = named.run(given, info.length)[0]
        finally:
            queue.mode = outside
            for joined in self._joined[layer]:
                joined.forget()
        return self._without_parameters(output, layer) if info.returns_parameter else output

    def _restart(self, layer: int, counting: Sequence[str]) -> None:
        """Restore a layer's run counters, so that the micro-batches of a step count once together."""
        module = self.layers[layer].module
        if layer not in self.starts:
            self.starts[layer] = read_attributes(module, counting)
        set_attributes(module, self.starts[layer])

    def _run_compiled(self, microbatch: int, layer: int, value: Value) -> bool:
        """Run one layer by its graphs, and return whether it has any; else it is to run eagerly."""
        compiled, info = self.compiled[layer], self.infos[microbatch][layer]
        sequence = self.sequences[microbatch] if self.sequences else None
        if sequence is None and not self._dropouts[layer]:  # the common case, kept cheap
            made = compiled.forward(value, info)
        else:
            with self._forward_contexts(sequence, microbatch, layer):
                made = compiled.forward(value, info, None if sequence is None else sequence.shape)
        if made is None:
            return False
        self.values[microbatch], run = made
        info.check(self.values[microbatch], self.layers[layer].path)
        self.runs[microbatch, layer] = LayerRun([], [], layer, run)
        return True

    def _forward_contexts(self, sequence: LocalSequence | None, microbatch: int, layer: int) -> ExitStack:
        """Return the contexts in which a layer runs: its dropout, and this rank's part of the sequences."""
        names, stack = self._dropouts[layer], ExitStack()
        if self.dropout and names:
            stack.enter_context(self.dropout.running(microbatch, self.layers[layer].path, names))
        if sequence is not None:
            stack.enter_context(running(sequence))
        return stack

    def _run_backward(
        self,
        roots: list[Tensor],
        seeds: list[Tensor],
        sequence: LocalSequence | None,
        first: int,
        last: int,
        late: list[WeightWork],
    ) -> None:
        """Run the backward of layers that ran together, in which recomputation may run them again.

        What autograd adds to buffers by itself, many small gradients, is added at the end in one operation;
        where `W` adds all gradients, `late` gets that.
        """
        held = set_aside(self._added_together(first, last), self.queue)
        try:
            if sequence is None:  # the common case, kept cheap
                run_backward(roots, seeds)
            else:
                with running(sequence):
                    run_backward(roots, seeds)
        finally:
            parameters, gradients = put_back(held, self.queue)
        if self.adds_late:
            late.append(partial(add_found, parameters, gradients, self.queue))
        else:
            add_found(parameters, gradients, self.queue)

    def _added_together(self, first: int, last: int) -> list[nn.Parameter]:
        """Return the parameters whose gradients are added after a backward: biases and norms.

        Where `W` adds all gradients, all of them; else a matrix's is added at once, which frees it, unless
        its buffer is not written yet, and holds what it held before the step.
        """
        if (first, last) not in self._together:
            every = list(dict.fromkeys(chain.from_iterable(self._parameters[first : last + 1])))
            together = [one for one in every if self.adds_late or one.dim() <= 1]
            self._together[first, last] = together, [one for one in every if one.dim() > 1]
        (together, matrices), unwritten = self._together[first, last], self.queue.unwritten
        if not unwritten or self.adds_late:
            return together
        return [*together, *[one for one in matrices if id(one) in unwritten]]

    def _without_parameters(self, output: Value, layer: int) -> Value:
        """Return `output` with clones of parameters, whose memory may be freed before the next layer runs."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self._parameters[layer]} - {0}
        return map_tensors(
            lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in own else tensor, output
        )

    def _add_note(self, error: Exception, microbatch: int, first: int, last: int) -> None:
        path, other = self.layers[first].path, self.layers[last].path
        where = f"layer {path!r}" if first == last else f"layers {path!r} to {other!r}"
        error.add_note(f"in stage {self.number}, micro-batch {microbatch}, {where}")


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
