"""A stage: consecutive layers, run one or several at a time, forward and backward.

The autograd graph is cut between layers that run one at a time: there parameters may be gathered, freed and
reduced. Layers that run together share a graph, which costs the host less. Per micro-batch and graph a stage
holds a `LayerRun` until `I`: the first layer's input (a leaf) and the last one's output (the root of the
graph); and between `I` and `W` the weight gradients that are still to be computed.

            values[m]                                                        values[m]
    F   ──①──→ leaf ────────→ layer ─────→ … ─────→ layer ────→ root ──②──→ detached, the next leaf
    I          its .grad ←─── layer ←──③── … ←───── layer ←─── seed ←────── gradients[m]
            gradients[m]        │                     │
    W                           └──④── work[m] ───────┘ ─────→ .grad of the weights

    ①  a micro-batch's input enters: a leaf, whose gradient the stage before is to get
    ②  the graph is cut: what comes after the root has a graph of its own
    ③  I: the backward of one graph, from the gradient of its root to that of its leaf; what it computes of
       biases and norms is added at its end
    ④  W: the products that I has queued are computed, and added to the buffers of the weights
    B  is ③ and ④, graph by graph

Each layer has a runner, chosen when the stage is made: a call of a micro-batch's number, the layer's info,
the part of the sequences and the input. It returns the output and a `LayerRun`, whose backward is that of the
layer alone; or None, where autograd has recorded the layer in a graph, which may go on through the next
layers. That graph's run is an `EagerRun`.

    EagerLayer.forward                        output, None
    RecomputingLayer(EagerLayer.forward)      the same, and the layer runs again in the backward
    CompiledRunner.forward                    output, CompiledRun; a layer without graphs: one of the others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from plait.engine.compilation.compiled_layer import CompiledLayer
from plait.engine.pipeline.layer_run_copies import LayerRecord
from plait.engine.pipeline.recompute import recomputing
from plait.models.layers.joinable_linears import Readers, join_linears
from plait.models.layers.layer_sequence import read_attributes, set_attributes
from plait.models.layers.shape_inference import LayerInfo, wrong_gradient_shape
from plait.plan.plan import Recompute
from plait.tensor.autograd.deferred_weight_gradients import made_by_linear
from plait.tensor.autograd.joined_linears import JoinedLinears
from plait.tensor.autograd.private_torch_functions import run_backward
from plait.tensor.autograd.weight_gradient_queue import (
    INPUT_ONLY,
    NO_WEIGHTS,
    WEIGHTS_AT_ONCE,
    WEIGHTS_NEXT,
    WeightGradientQueue,
    WeightWork,
)
from plait.tensor.dropout import DropoutGenerator, names_of
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router, routers_of
from plait.tensor.experts.router_losses_of_step import StepBalance
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, detached, list_of_tensors, map_tensors
from plait.tensor.parallel.apply_float8 import casts_in, find_weight_factors, float8_linears_in
from plait.tensor.running_sequence import LocalSequence, running

Gradients: TypeAlias = list[Tensor | None]
"""One per tensor of a value, in the order of `tensors_of`; None for a tensor without a gradient."""


class LayerRun(Protocol):
    """Interface of one micro-batch's run of one layer or several, kept from forward to backward."""

    def backward(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the input's tensors, given the output's; queue weight gradients."""

    def output_is_read(self) -> bool:
        """Return whether the backward may read the output, which must then not be written to."""


LayerRunner: TypeAlias = Callable[
    [int, LayerInfo, LocalSequence | None, Value], tuple[Value, LayerRun | None]
]


@dataclass
class Stage:
    """Consecutive layers of the model, and the state of their unfinished micro-batches."""

    number: int
    layers: Sequence[NamedLayer]
    queue: WeightGradientQueue
    infos: Sequence[Sequence[LayerInfo]] = ()
    """Per micro-batch, then per layer."""
    recompute: Sequence[Recompute] = ()
    """How much of each layer's activations is computed again in its backward; empty: none of them."""
    dropout: DropoutGenerator | None = None
    """The random numbers of the layers' dropouts."""
    balance: StepBalance | None = None
    """The losses of the layers' routers."""
    sequences: Sequence[LocalSequence | None] = ()
    """Per micro-batch, this rank's part of its sequences; None where they are whole."""

    values: dict[int, Value] = field(default_factory=dict)
    """Per micro-batch: the current activation, input of the next layer to run, whose tensors are leaves."""
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """Per micro-batch: the gradients of the activation that the backward has reached."""
    runs: dict[tuple[int, int], tuple[LayerRun, int, LocalSequence | None]] = field(default_factory=dict)
    """Per (micro-batch, first layer): the run, the last layer's number, the sequence of its forward."""
    work: dict[tuple[int, int], list[WeightWork]] = field(default_factory=dict)
    """Per (micro-batch, first layer): the weight gradients that `I` has left to `W`."""
    records: Mapping[tuple[int, int], LayerRecord] = field(default_factory=dict)
    """Per (micro-batch, first layer): what the layers read and write, where it is wanted."""

    def __post_init__(self) -> None:
        modes: Sequence[Recompute] = self.recompute or ["none"] * len(self.layers)
        self._eager = [EagerLayer(layer, self.queue, self.dropout, self.balance) for layer in self.layers]
        self.routing_layers = [one.layer.path for one in self._eager if one.balance is not None]
        """The paths of layers whose routers count their choices."""
        self._evaluating: list[LayerRunner] = [one.forward for one in self._eager]
        self._without_graphs: list[LayerRunner] = [
            recomputing(mode, one.forward, one.parameters, decides=one.decides)
            for mode, one in zip(modes, self._eager, strict=True)
        ]
        self._training = self._without_graphs
        self.compiled: Sequence[CompiledLayer] = ()
        """For each layer, if layers are compiled."""
        users = Counter(id(parameter) for one in self._eager for parameter in one.parameters)
        self.sharing = {
            number
            for number, one in enumerate(self._eager)
            if any(users[id(parameter)] > 1 for parameter in one.parameters)
        }
        """The layers that share parameters with others of the stage."""
        self._together: dict[tuple[int, int], GraphParameters] = {}
        """By first and last layer of a graph."""
        if self.infos:
            self.expect(self.infos)

    def run_compiled(self, layers: Sequence[CompiledLayer]) -> None:
        """From now on run layers as compiled graphs in training; `layers` has one per layer, or none."""
        self.compiled = layers
        each = zip(layers, self._eager, self._without_graphs, strict=bool(layers))
        self._training = [CompiledRunner(*one).forward for one in each] or self._without_graphs

    def expect(self, infos: Sequence[Sequence[LayerInfo]]) -> None:
        """Prepare for micro-batches of shapes `infos`: join linears that read the same input in all of them.

        Where sequences are cut, keys and values are sent while queries are computed: there none are joined.
        """
        self.infos = infos
        sends_keys = any(one is not None and one.group.size > 1 for one in self.sequences)
        for number, eager in enumerate(self._eager):
            each = [one[number].readers for one in infos]
            common = (one for one in each[0] if all(one in other for other in each[1:]))
            eager.join(() if sends_keys else tuple(common))

    def begin(self) -> None:
        """Begin a step: reset what layers derived from parameters, which may have changed since."""
        for layer in self._eager:
            layer.before = None
            for joined in layer.joined:
                joined.begin_step()
            if layer.casts:
                layer.begin_step()

    def forward(self, microbatch: int, layer: int, last: int | None = None) -> None:
        """Run layer `layer`, or layers `layer` to `last` in one graph, on the micro-batch's activation.

        Stores the detached output.
        """
        value, last = self.values.pop(microbatch), layer if last is None else last  # ①
        trains = torch.is_grad_enabled()
        inputs = list_of_tensors(value) if trains else []
        sequence = self.sequences[microbatch] if self.sequences else None
        runners, infos = self._training if trains else self._evaluating, self.infos[microbatch]
        run: LayerRun | None = None
        record = self.records.get((microbatch, layer)) if trains and self.records else None
        if record is not None:
            record.begin_forward(value, last)
        for number in range(layer, last + 1):
            try:
                value, run = runners[number](microbatch, infos[number], sequence, value)
                infos[number].check(value, self.layers[number].path)
            except Exception as error:
                self._add_note(error, microbatch, number, number)
                raise
        if run is None:
            outputs = value
            value = detached(outputs)  # ②
            if trains:
                parameters = self._together.get((layer, last)) or self._parameters_of(layer, last)
                run = EagerRun(parameters, inputs, list_of_tensors(outputs))
        if run is not None:
            self.runs[microbatch, layer] = run, last, sequence
        if record is not None:
            record.end_forward(value)
        self.values[microbatch] = value

    def backward_input(self, microbatch: int, layer: int) -> None:
        """Compute the gradient of a layer's input from that of its output; defer its weight gradients.

        `layer`: the first of those that ran together, here and in `backward_weight` and `backward`.
        """
        run, last, sequence = self.runs.pop((microbatch, layer))
        given = self.gradients.pop(microbatch)
        record = self.records.get((microbatch, layer)) if self.records else None
        if record is not None:
            record.begin_backward(given)
        try:
            if sequence is None:  # the common case, kept cheap
                gradients = run.backward(given)  # ③
            else:
                with running(sequence):
                    gradients = run.backward(given)
        except Exception as error:
            self._add_note(error, microbatch, layer, last)
            raise
        self.work[microbatch, layer] = self.queue.take()
        self.gradients[microbatch] = gradients
        if record is not None:
            record.end_backward(gradients)

    def backward_weight(self, microbatch: int, layer: int) -> None:
        """Compute the layer's deferred weight gradients and add them to `.grad`."""
        record = self.records.get((microbatch, layer)) if self.records else None
        if record is not None and not record.is_fused:
            record.snapshot_buffers()
        for work in self.work.pop((microbatch, layer)):
            work()  # ④
        if record is not None:
            record.snapshot_buffers()

    def backward(self, microbatch: int, layer: int) -> None:
        """Compute input and weight gradients; the latter may overlap the former's reduction over `tp`.

        Of layers that ran together weight gradients are computed as they come: else what all of them need
        would stay until the last one.
        """
        _, last, _ = self.runs[microbatch, layer]
        if self.records and (microbatch, layer) in self.records:
            self.records[microbatch, layer].is_fused = True
        self.queue.mode = WEIGHTS_NEXT if last == layer else WEIGHTS_AT_ONCE
        try:
            self.backward_input(microbatch, layer)
        finally:
            self.queue.mode = INPUT_ONLY
        self.backward_weight(microbatch, layer)

    def output_is_read(self, microbatch: int) -> bool:
        """Return whether something may still read the last layer's output, which must then not be written to.

        That is the layer's backward, or a hook or attribute of the layer.
        """
        end = len(self.layers) - 1
        return self.infos[microbatch][end].output_is_kept or any(
            number == microbatch and last == end and run.output_is_read()
            for (number, _), (run, last, _) in self.runs.items()
        )

    def clear(self) -> None:
        """Discard every unfinished micro-batch, after an exception within a step."""
        self.queue.take()
        self.set_back()
        for held in (self.values, self.gradients, self.runs, self.work):
            held.clear()

    def set_back(self) -> None:
        """Restore the attributes in which layers count their runs to their values before the step."""
        for one in self._eager:
            one.set_back()

    def _parameters_of(self, first: int, last: int) -> GraphParameters:
        """Return the parameters of the layers of one graph, and keep them for the next micro-batch."""
        every = chain.from_iterable(one.parameters for one in self._eager[first : last + 1])
        found = self._together[first, last] = GraphParameters(list(dict.fromkeys(every)), self.queue)
        return found

    def _add_note(self, error: Exception, microbatch: int, first: int, last: int) -> None:
        path, other = self.layers[first].path, self.layers[last].path
        where = f"layer {path!r}" if first == last else f"layers {path!r} to {other!r}"
        error.add_note(f"in stage {self.number}, micro-batch {microbatch}, {where}")


class EagerLayer:
    """Runs a layer eagerly; holds its dropouts, joined linears and run counters, also if it is compiled."""

    def __init__(
        self,
        layer: NamedLayer,
        queue: WeightGradientQueue,
        dropout: DropoutGenerator | None,
        balance: StepBalance | None,
    ) -> None:
        self.layer, self.queue, self.dropout = layer, queue, dropout
        self.balance = balance if routers_of([layer]) else None
        self.parameters = list(layer.module.parameters())
        self.dropouts = names_of(layer.module)
        self.has_contexts = bool(self.dropouts) or self.balance is not None
        """Whether the layer runs in a context of its micro-batch: it has dropouts or routers."""
        chooses = any(isinstance(one, Router | Experts) for one in layer.module.modules())
        self.float8_linears = float8_linears_in(layer.module)
        self.casts = casts_in(layer.module)
        """Of the linears that multiply in float8, and of experts."""
        self._finds_factors = bool(self.float8_linears)
        self.decides = chooses or any(one.casts.are_divided for one in self.float8_linears)
        """Whether a recomputation must not choose experts, or reduce scales over ranks, again."""
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
        if self.float8_linears:
            self.find_weight_factors()
            queue.inputs.begin(info.regions_in_float8)
        try:
            if sequence is None and layer.run_on_parts is None and not self.has_contexts:
                output = layer.module(given)  # the common case, kept cheap
            else:
                with self.contexts(microbatch, sequence):
                    output = layer.run(given, info.length)[0]
        finally:
            queue.mode = outside
            for joined in self.joined:
                joined.forget()
            if self.float8_linears:
                queue.inputs.forget()
        return (self._without_parameters(output) if info.returns_parameter else output), None

    def begin_step(self) -> None:
        """Forget the float8 scale factors of the layer's weights, which an update may have changed."""
        for casts in self.casts:
            casts.begin_step()
        self._finds_factors = bool(self.float8_linears)

    def find_weight_factors(self) -> None:
        """Compute the float8 scale factors of the layer's weights, in its first run of a step.

        Communication: as `apply_float8.find_weight_factors`.
        """
        if self._finds_factors:
            find_weight_factors(self.float8_linears, learns=torch.is_grad_enabled())
            self._finds_factors = False

    def join(self, readers: tuple[Readers, ...]) -> None:
        """From now on compute linears that read the same input, those in `readers`, as one product."""
        if readers != self._readers:
            for joined in self.joined:
                joined.release()
            self._readers = readers
            self.joined = join_linears(self.layer.module, readers, self.queue)

    def set_back(self) -> None:
        """Restore the attributes in which the layer counts its runs to their values before the step."""
        if self.before is not None:
            set_attributes(self.layer.module, self.before)

    def contexts(self, microbatch: int, sequence: LocalSequence | None) -> ExitStack:
        """Return the contexts in which the layer runs: for dropouts, for routers, and `sequence`."""
        stack = ExitStack()
        if self.dropout and self.dropouts:
            stack.enter_context(self.dropout.running(microbatch, self.layer.path, self.dropouts))
        if self.balance is not None:
            stack.enter_context(self.balance.running(microbatch))
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
    """Runs a layer as compiled graphs; inputs without graphs are run by `other`, an eager runner."""

    def __init__(self, compiled: CompiledLayer, layer: EagerLayer, other: LayerRunner) -> None:
        self.compiled, self.layer, self.other = compiled, layer, other

    def forward(
        self, microbatch: int, info: LayerInfo, sequence: LocalSequence | None, value: Value
    ) -> tuple[Value, LayerRun | None]:
        """Run the layer; return its output, whose tensors are leaves, and the run for its backward."""
        self.layer.find_weight_factors()
        if sequence is None and not self.layer.has_contexts:  # the common case, kept cheap
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
    """The autograd graph of layers that ran together, from the detached input to the output."""

    def __init__(self, parameters: GraphParameters, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.parameters, self.inputs, self.outputs = parameters, inputs, outputs

    def backward(self, gradients: Gradients) -> Gradients:
        """Run the graph's backward; return the inputs' gradients, and add or queue those of parameters.

        Recomputation may run the layers again in it.
        """
        queue, together = self.parameters.queue, self.parameters.together
        roots, seeds = _with_gradient(self.outputs, gradients)
        if roots:
            if queue.unwritten:
                late = [one for one in self.parameters.matrices if id(one) in queue.unwritten]
                together = [*together, *late]
            held = queue.set_aside(together)
            try:
                run_backward(roots, seeds)
            finally:
                parameters, found = queue.put_back(held)
            if queue.adds_late:
                queue.pending.insert(0, partial(queue.add_found, parameters, found))
            else:
                queue.add_found(parameters, found)
        return [tensor.grad for tensor in self.inputs]

    def output_is_read(self) -> bool:
        """Return whether the backward may read the output, which must then not be written to."""
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
