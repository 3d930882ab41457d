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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from plait.engine.compilation.compiled_layer import CompiledLayer
from plait.engine.pipeline.layer_runner import (
    CompiledRunner,
    EagerLayer,
    EagerRun,
    Gradients,
    GraphParameters,
    LayerRun,
    LayerRunner,
)
from plait.engine.pipeline.recompute import recomputing
from plait.models.layers.shape_inference import LayerInfo
from plait.plan.plan import Recompute
from plait.tensor.autograd.weight_gradient_queue import (
    INPUT_ONLY,
    WEIGHTS_AT_ONCE,
    WEIGHTS_NEXT,
    WeightGradientQueue,
    WeightWork,
)
from plait.tensor.dropout import DropoutGenerator
from plait.tensor.layer_values import NamedLayer, Value, detached, list_of_tensors
from plait.tensor.running_sequence import LocalSequence, running


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

    def __post_init__(self) -> None:
        modes: Sequence[Recompute] = self.recompute or ["none"] * len(self.layers)
        self._eager = [EagerLayer(layer, self.queue, self.dropout) for layer in self.layers]
        self._evaluating: list[LayerRunner] = [one.forward for one in self._eager]
        self._without_graphs: list[LayerRunner] = [
            recomputing(mode, one.forward, one.parameters)
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
        """Run layers as compiled graphs in training from now on; `layers` has one for each, or none."""
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
        """Begin a step: refresh views of parameters, whose memory may have changed since the last step."""
        for layer in self._eager:
            layer.before = None
            for joined in layer.joined:
                joined.begin_step()

    def forward(self, microbatch: int, layer: int, last: int | None = None) -> None:
        """Run one layer on the micro-batch's current activation, or those up to `last`, in one graph.

        Stores the detached output.
        """
        value, last = self.values.pop(microbatch), layer if last is None else last  # ①
        trains = torch.is_grad_enabled()
        inputs = list_of_tensors(value) if trains else []
        sequence = self.sequences[microbatch] if self.sequences else None
        runners, infos = self._training if trains else self._evaluating, self.infos[microbatch]
        run: LayerRun | None = None
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
        self.values[microbatch] = value

    def backward_input(self, microbatch: int, layer: int) -> None:
        """Compute the gradient of a layer's input from that of its output; defer its weight gradients.

        `layer`: the first of those that ran together, here and in `backward_weight` and `backward`.
        """
        run, last, sequence = self.runs.pop((microbatch, layer))
        given = self.gradients.pop(microbatch)
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

    def backward_weight(self, microbatch: int, layer: int) -> None:
        """Compute the layer's deferred weight gradients and add them to `.grad`."""
        for work in self.work.pop((microbatch, layer)):
            work()  # ④

    def backward(self, microbatch: int, layer: int) -> None:
        """Compute input and weight gradients; the latter may overlap the former's reduction over `tp`.

        Of layers that ran together weight gradients are computed as they come: else what all of them need
        would stay until the last one.
        """
        _, last, _ = self.runs[microbatch, layer]
        self.queue.mode = WEIGHTS_NEXT if last == layer else WEIGHTS_AT_ONCE
        try:
            self.backward_input(microbatch, layer)
        finally:
            self.queue.mode = INPUT_ONLY
        self.backward_weight(microbatch, layer)

    def output_is_read(self, microbatch: int) -> bool:
        """Return whether the last layer's backward may read its output, which must then not be written to."""
        end = len(self.layers) - 1
        return any(
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
        """Restore the layers' run counters to their values before the step."""
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
