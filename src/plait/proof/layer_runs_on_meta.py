"""Shape inference of layers, and proofs that rules are correct for them, from runs on the meta device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import ModelError, listed
from plait.models.choose_float8_linears import refuse_other_readers
from plait.models.find_float8_only_inputs import read_by_float8_only
from plait.models.layers.layer_sequence import LayerSequence, on_meta, private_copy
from plait.models.layers.shape_inference import InferredLayer, LayerInfo, LayerInput, run_on_meta
from plait.models.layers.stateful_layer_check import refuse_carried_values
from plait.plan.layout.layout import Layout
from plait.plan.parameter_units import BufferKind
from plait.plan.rules import join
from plait.proof.gradient_proof import Claims, prove_layer
from plait.proof.position_proof import prove_positions_apart
from plait.tensor.chunked_cross_entropy import require_features, return_features
from plait.tensor.dropout import names_of
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.experts.experts import ExpertRanks
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.parallel.partition import is_sharded
from plait.tensor.parallel.tensor_parallelism import TensorParallelism
from plait.tensor.running_sequence import running_sequence

MOST_RESULTS = 4096
"""Size of the cache of runs."""


class MetaLayers:
    """Runs layers of a model on the meta device, to infer shapes and prove gradients; equal ones run once."""

    def __init__(
        self,
        sequence: LayerSequence,
        structures: Sequence[Hashable],
        layouts: Mapping[str, Layout],
        kinds: Mapping[str, BufferKind],
        tensor_parallel: TensorParallelism,
        *,
        coordinate: Mapping[str, int],
        dtype: torch.dtype | None,
        results: dict[Hashable, Any],
        output_linear: str | None = None,
        gathered_in_float8: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """`results`: a cache of runs, which the ranks of a process may share.

        `structures`: of each layer. `layouts` and `kinds` are those of the parameters, see `Blueprint`;
        `dtype` is the compute dtype. `output_linear`: that of the last layer, whose input the layer returns.
        `gathered_in_float8`: for each layer the names of linears that can gather their input in float8.
        """
        self._sequence, self._given_structures, self._dtype = sequence, structures, dtype
        self._shapes = {name: tuple(layout.local_shape(coordinate)) for name, layout in layouts.items()}
        self._rules, self._results = tensor_parallel, results
        self._output_linear = output_linear
        self._gathering = gathered_in_float8 or [()] * len(sequence.layers)
        self._output_inside = tensor_parallel.vocabulary_of(sequence.layers[-1]) is not None
        sharded = {name for name, layout in layouts.items() if is_sharded(layout)}
        frozen = {name for name, kind in kinds.items() if not kind.trains}
        self._sharded, self._frozen = _names(sequence, sharded), _names(sequence, frozen)
        self._summed = _names(sequence, {name for name, kind in kinds.items() if kind.summands > 1})
        self._scaled = _names(sequence, {name for name, kind in kinds.items() if kind.scaled})

    @cached_property
    def layers(self) -> list[NamedLayer]:
        """The layers on meta, with this rank's shards of parameters, but no tensor-parallel rule applied."""
        empty = on_meta(self._sequence, self._dtype, self._shapes)
        return private_copy(self._sequence.layers, empty)

    @property
    def are_proved(self) -> bool:
        """Whether gradients need a proof: if a parameter, the sequence or dropout is divided over `tp`."""
        rules, sequence_dims = self._rules.cuts.values(), self._rules.sequence_dims.values()
        return (
            any(self._sharded)
            or any(dims.input is not None for dims in sequence_dims)
            or any(rule.kind in ("piece", "replicated") for rule in rules)
        )

    def infer(self, microbatch: Value, *, input_gradients: bool) -> list[LayerInfo]:
        """Return a `LayerInfo` per layer for a micro-batch: shapes and dtypes of its output, and more.

        Layers run in training mode if gradients are enabled, else in evaluation mode.
        """
        return [run.info for run in self._runs(microbatch, input_gradients=input_gradients, proves=False)]

    def prove(self, microbatch: Value) -> None:
        """Raise ModelError unless all parameters and layer inputs receive complete gradients under the rules.

        Proved for a micro-batch, with the rules of tensor parallelism. Frozen parameters are proved like
        trained ones, since they shape the values of the rest.
        """
        for _ in self._runs(microbatch, input_gradients=True, proves=True):
            pass

    def prove_positions_apart(self, microbatch: Value) -> None:
        """Raise ModelError if a layer mixes positions of the sequence other than by `plait.attention`.

        `microbatch`: dim 1 of its tensors is the sequence. For context parallelism; tensor parallelism's
        rules are not applied.
        """
        shapes = {name: parameter.shape for name, parameter in self._sequence.parameters.items()}
        empty = on_meta(self._sequence, self._dtype, shapes)
        value = LayerInput.of_batch(microbatch, input_gradients=False).value
        layers = private_copy(self._sequence.layers, empty)
        for layer, structure in zip(layers, self._given_structures, strict=True):
            key = "positions apart", structure, self._dtype, _described(value)
            if key not in self._results:
                self._results[key] = prove_positions_apart(layer, value)
            value = self._results[key]

    def _runs(self, microbatch: Value, *, input_gradients: bool, proves: bool) -> Iterator[InferredLayer]:
        given = LayerInput.of_batch(microbatch, input_gradients=input_gradients)
        sequence = running_sequence()
        modes = proves, torch.is_grad_enabled(), torch.get_default_dtype(), sequence and sequence.shape
        longest = 0 if sequence is None else sequence.longest
        for number in range(len(self.structures)):
            run = self._run_once(number, given, modes, longest)
            counting = () if proves else self._counting(number, given)
            regions = () if proves else self.regions_in_float8(number, given)
            if counting or regions:
                run = replace(run, info=replace(run.info, counting=counting, regions_in_float8=regions))
            if self._scaled[number] and not proves:
                self._refuse_other_readers(number, given)
            yield run
            given = run.next_input()
        while len(self._results) > MOST_RESULTS:
            del self._results[next(iter(self._results))]

    def _run_once(
        self, number: int, given: LayerInput, modes: tuple[Hashable, ...], longest: int
    ) -> InferredLayer:
        """Return a layer's output on the meta device, cached or computed; `modes[0]`: with a proof."""
        proves, *others = modes
        shape = given.length, given.repeats, _described(given.value)
        of_all, of_rank = ((one[number], *shape) for one in (self._structures_of_all_ranks, self.structures))
        for key in (of_all, of_rank):
            # Documents change no shape, but a layer may refuse long ones: one that ran takes shorter ones.
            known, run = self._results.get((key, *modes), (-1, None))
            if run is not None and known >= longest:
                return cast(InferredLayer, run)
        run, is_proved = self._run(number, given, proves=bool(proves))
        # Parts of a sequence that `tp` does not divide evenly have the sizes of this rank.
        key = of_all if run.output.length % self._rules.group.size == 0 else of_rank
        for proved in {proves, is_proved}:
            self._results[key, proved, *others] = longest, run
        return run

    def _run(self, number: int, given: LayerInput, *, proves: bool) -> tuple[InferredLayer, bool]:
        """Run a layer on the meta device with its rules; return also whether its gradients are proved.

        `proves`: they have to be; else they are where that takes no other run. They are proved for the layer
        with its output linear, like those of the other layers.
        """
        layer = self._copy(number, trains=torch.is_grad_enabled())
        if proves:
            for parameter in layer.module.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
        group = self._rules.group
        circumstances = f"with plan.tp = {group.size}, " if group.size > 1 else ""
        is_last, returned = number == len(self._sequence.layers) - 1, list[Tensor]()
        name = self._output_linear if is_last and not proves else None
        if name is not None:
            return_features(layer.module, name, returned)
        run, output = run_on_meta(layer, given, circumstances)
        if name is not None:
            require_features(output, returned, layer, name)
        learns_all = torch.is_grad_enabled() and not self._frozen[number]
        if not proves and not (self.are_proved and learns_all and name is None):
            return run, False
        parameters = dict(layer.module.named_parameters(remove_duplicate=False))
        claims = self._claims(number, layer)
        with nullcontext() if proves else suppress(ModelError):  # which `prove` raises when it is called
            prove_layer(layer.path, tensors_of(given.value), tensors_of(output), parameters, claims)
            return run, True
        return run, False

    def _counting(self, number: int, given: LayerInput) -> tuple[str, ...]:
        """Return the names of values that count a layer's runs; in training refuse other state of it.

        Layers of equal structure are looked at once in training and once in evaluation, for the first shape
        of their input. Raises ModelError where another layer shares it.
        """
        trains = torch.is_grad_enabled()
        key = "carried values", self._structures_of_all_ranks[number], trains
        if key not in self._results:
            copied = self._copy(number, trains=trains)
            # An evaluation counts nothing that training goes on with.
            with nullcontext() if trains else suppress(ModelError):
                self._results[key] = refuse_carried_values(copied, given.value, given.length)
        counting: tuple[str, ...] = self._results.setdefault(key, ())
        layers = self._sequence.layers
        for name in counting:
            owner = layers[number].module.get_submodule(name.rpartition(".")[0])
            users = [one.path for one in layers if any(owner is other for other in one.module.modules())]
            if len(users) > 1:
                raise ModelError(
                    f"{join(layers[number].path, name)} changes in each run of its layer, and the layers "
                    f"{listed(users)} share it: its value would depend on which of them a rank has, so give "
                    "each a module of its own."
                )
        return counting

    def regions_in_float8(self, number: int, given: LayerInput) -> tuple[bool, ...]:
        """Return for each tensor-parallel region of layer `number` whether its input is gathered in float8.

        Empty where no linear of the layer can, or sequence parallelism gives it no parts. Looked at as
        `_counting` does.
        """
        linears, trains = self._gathering[number], torch.is_grad_enabled()
        if not linears or self._rules.sequence_dims[self.layers[number].path].input is None:
            return ()
        shape = given.length, _described(given.value)  # a layer may read it for some shapes only
        key = "regions in float8", self._structures_of_all_ranks[number], linears, trains, *shape
        if key not in self._results:
            copied = self._copy(number, trains=trains)
            self._results[key] = read_by_float8_only(copied, linears, given.value, given.length)
        found: tuple[bool, ...] = self._results[key]
        return found

    def _copy(self, number: int, *, trains: bool) -> NamedLayer:
        """Return a copy of layer `number` on meta, with its rules applied, in training mode or not."""
        (copied,) = self._rules.apply(private_copy(self.layers[number : number + 1], {}))
        if not trains:
            copied.module.eval()
        return copied

    def _refuse_other_readers(self, number: int, given: LayerInput) -> None:
        """Raise ModelError where a layer reads weights that it gets in float8 other than by their linears.

        Looked at as `_counting` does.
        """
        trains = torch.is_grad_enabled()
        key = "weights in float8", self._structures_of_all_ranks[number], trains
        if key not in self._results:
            copied = self._copy(number, trains=trains)
            refuse_other_readers(copied, self._scaled[number], given.value, given.length)
            self._results[key] = True

    def _claims(self, number: int, layer: NamedLayer) -> Claims:
        """Return the claims that the proof of layer `number` checks; `layer`: a copy with rules applied."""
        dims = self._rules.sequence_dims[layer.path]
        # Whatever part of the tokens a rank gives to experts, their gradients are complete: see `Experts`.
        proved = self._sharded[number] | {
            join(name, one)
            for name, module in experts_in(layer.module)
            for one, _ in module.named_parameters()
        }
        return Claims(
            sharded=self._sharded[number],
            frozen=(self._frozen[number] | proved) - self._sharded[number],
            summed=self._summed[number] - proved,
            input_in_parts=dims.previous is not None,
            output_in_parts=dims.next is not None,
            dropouts=names_of(layer.module),
            output_inside=self._output_inside and number == len(self._sequence.layers) - 1,
        )

    @cached_property
    def structures(self) -> list[Hashable]:
        """Per layer a cache key: equal for layers whose runs on meta are the same for equal inputs.

        Layers with equal keys have the same graphs, too, in which there may be numbers of this rank.
        """
        return [(one, self._rules.group.index) for one in self._structures_of_all_ranks]

    @cached_property
    def _structures_of_all_ranks(self) -> list[Hashable]:
        """Per layer a cache key of its structure that is the same on all `tp` ranks with equal parts."""
        rules, group = self._rules, self._rules.group
        last = len(self._sequence.layers) - 1
        names = {id(parameter): name for name, parameter in self._sequence.parameters.items()}
        return [
            (
                self._given_structures[number],
                self._dtype,
                tuple(self._shapes[names[id(one)]] for one in layer.module.parameters()),
                tuple(rules.cuts.get(join(layer.path, name)) for name, _ in layer.module.named_modules()),
                rules.sequence_dims[layer.path],
                group.size,
                _expert_degrees(layer.module, rules.experts),
                (self._sharded[number], self._summed[number], self._frozen[number], self._scaled[number]),
                self._output_inside and number == last,
                self._output_linear if number == last else None,
            )
            for number, layer in enumerate(self._sequence.layers)
        ]


def _expert_degrees(layer: nn.Module, ranks: ExpertRanks | None) -> tuple[int, int, int, bool] | None:
    """Return how the experts of `layer` are divided, or None where it has none, or each rank has all."""
    if ranks is None or not any(experts_in(layer)):
        return None
    return ranks.group.size, ranks.group.index, ranks.etp, ranks.takes_all


def _names(sequence: LayerSequence, wanted: set[str]) -> list[frozenset[str]]:
    """Return for each layer the names, in the layer, of its parameters that are among `wanted`."""
    ids = {id(sequence.parameters[name]) for name in wanted}
    return [
        frozenset(
            name
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
            if id(parameter) in ids
        )
        for layer in sequence.layers
    ]


def _described(value: Value) -> str:
    """Return shapes, strides, dtypes and `requires_grad` of a value's tensors: a cache key of meta runs."""
    return repr(
        map_tensors(lambda one: (tuple(one.shape), one.stride(), one.dtype, one.requires_grad), value)
    )
