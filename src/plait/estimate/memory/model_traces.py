"""`trace_model`: the memory that each layer of a model and its loss allocate and save, on the meta device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.blueprint import Blueprint
from plait.engine.compilation.compiled_layer import CompiledLayer, LayerCompiler
from plait.engine.pipeline.loss_stage import build_loss_stage
from plait.engine.pipeline.stage import Stage
from plait.estimate.memory.context_parallel_microbatch import (
    ContextShare,
    as_input,
    as_input_batch,
    context_share,
    lasting_bytes,
    method_choices,
    result_bytes,
)
from plait.estimate.memory.layer_traces import Trace, meta_leaf, trace_layer, whole_backward_peak
from plait.estimate.memory.loss_traces import TracedLoss, traced_loss
from plait.estimate.memory.operation_recorder import OperationRecorder, group_on_meta, with_loss
from plait.estimate.memory.remembered_results import RememberedResults
from plait.estimate.time.layer_work import LayerWork
from plait.models.layers.layer_sequence import on_meta, private_copy
from plait.models.layers.shape_inference import InferredLayer, LayerInfo, LayerInput, run_on_meta
from plait.models.result_cache import ResultCache, result_caches
from plait.plan.axes import AXES, EXPERTS_ONLY
from plait.plan.plan import Recompute
from plait.tensor.attention.ulysses import MethodChoice
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.float8_operands import LinearCasts
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dtypes import DTYPES, torch_dtype
from plait.tensor.experts.expert_casts import MatrixCasts
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.losses import Loss
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.parallel.apply_float8 import Float8Layers, casts_of
from plait.tensor.parallel.tensor_parallelism import TensorParallelism
from plait.tensor.running_sequence import LocalSequence, running

FIRST = dict.fromkeys((*AXES, *EXPERTS_ONLY), 0)
"""The coordinate of the rank that is traced."""


@dataclass(frozen=True)
class ModelTraces:
    """Memory that each layer of a model, in order, and its loss allocate and save for one micro-batch."""

    layers: Sequence[Trace]
    infos: Sequence[LayerInfo]
    loss: Trace
    output_copy: int
    """Bytes of a copy of the output for the loss; 0 where it is not copied."""
    inputs: Sequence[int]
    """Bytes of each tensor of the input."""
    targets: Sequence[int]
    caches: Sequence[Mapping[Hashable, int]]
    """Of each layer the bytes that its caches hold, by a number of the cache."""
    lasting: Sequence[Mapping[Hashable, int]]
    """Of each layer the bytes of what all layers of a rank share for all micro-batches, by key."""
    shared: Sequence[Mapping[Hashable, int]]
    """Of each layer the bytes of the results that layers share for a micro-batch's sequences, by key."""
    uncut: int
    """Bytes of the given tensors of which `inputs` and `targets` are copies, or which are neither."""
    attention: frozenset[MethodChoice]
    """The methods that attention layers choose under context parallelism."""
    works: Sequence[LayerWork]
    """Operations and collectives of each layer, of the last with the loss; empty without a recorder."""
    first_works: Sequence[LayerWork] = ()
    """The same of a step's first micro-batch, in which matrices of experts are cast that are kept then."""

    @property
    def loss_bytes(self) -> int:
        """The most bytes that the loss allocates beside what layers save."""
        return self.output_copy + self.loss.forward.peak

    @cached_property
    def largest_output(self) -> int:
        """The most bytes that a layer hands to the next one."""
        return max((sum(one.nbytes for one in info.tensors) for info in self.infos[:-1]), default=0)


def trace_model(
    blueprint: Blueprint,
    microbatch: Value,
    targets: Value | None,
    loss: Loss,
    recorder: OperationRecorder | None = None,
    known: KnownTraces | None = None,
    *,
    takes_all: bool = False,
    on_cpu: bool = True,
) -> ModelTraces:
    """Return the memory that each layer and the loss allocate and save on the first rank of `tp`.

    Layers of equal structure that read equal inputs are traced once. The rank has the largest shards; which
    rank of `cp` it is, see `context_share`. Raises ModelError where a layer does not run on meta.
    Without `targets` there is a class for each row of the output. `recorder`: records operations, too.
    `known`: traces of plans that differ in `ep`, `etp`, `recompute` and rows only; those of layers that run
    alike, and of losses of equal outputs, are taken from it, and others added. `takes_all`: whether all
    tokens have the experts of this rank, or as uniform routing gives it. `on_cpu`: layers would run on CPUs.
    """
    queue = WeightGradientQueue(blueprint.lowering_spec.adds_late)
    tensor_parallel = _tensor_parallel(blueprint, recorder, takes_all=takes_all)
    layers = blueprint.sequence.layers
    copies = MetaCopies(blueprint, tensor_parallel, queue, recorder, on_cpu)
    vocabulary = tensor_parallel.vocabulary_of(layers[-1])
    end = build_loss_stage(blueprint, loss, vocabulary, copies.layer(len(layers) - 1), queue)
    share = context_share(
        blueprint.plan, as_input_batch(microbatch, DTYPES[blueprint.plan.precision]), targets, recorder
    )
    known = KnownTraces() if known is None else known
    traced = _trace_layers(copies, share, known)
    value = traced[-1].output
    is_copied = end.writes_output and traced[-1].trace.output_is_read
    classes = share.targets
    if classes is None:
        classes = map_tensors(lambda one: one.new_empty(one.shape[:-1], dtype=torch.int64), value)
    classes = map_tensors(lambda tensor: as_input(tensor, None), classes)
    key = traced[-1].described, _described(classes)
    if key not in known.losses:
        known.losses[key] = traced_loss(end, queue, value, classes, recorder)
    of_loss, loss_work = known.losses[key]
    works = [one.work for one in traced if one.work is not None]
    first_works = [one.first_work for one in traced if one.first_work is not None]
    if loss_work is not None:
        works[-1], first_works[-1] = (with_loss(each[-1], loss_work) for each in (works, first_works))
    return ModelTraces(
        [one.trace for one in traced],
        [one.run.info for one in traced],
        of_loss,
        sum(_bytes(value)) if is_copied else 0,
        _bytes(share.inputs),
        _bytes(classes),
        [_cache_bytes(layer, one) for layer, one in zip(layers, traced, strict=True)],
        [lasting_bytes(one.sequence) for one in traced],
        [result_bytes(one.sequence) for one in traced],
        share.uncut_beside(classes),
        frozenset(chain.from_iterable(method_choices(one.sequence) for one in traced)),
        works,
        first_works,
    )


class CachedBytes(NamedTuple):
    """Bytes of cached results that one attribute of a module holds after a step, with both names."""

    module: str
    """The module's name in the layer."""
    name: str
    """The attribute's."""
    nbytes: int


@dataclass(frozen=True)
class TracedLayer:
    """A layer's memory, output and operations, from its run on the meta device; equal layers share them."""

    run: InferredLayer
    trace: Trace
    output: Value
    cached: Sequence[CachedBytes]
    sequence: LocalSequence | None
    """The sequence for which it ran, with what it computed to share."""
    work: LayerWork | None
    """None where operations are not recorded."""
    first_work: LayerWork | None
    """That of a step's first micro-batch."""

    @cached_property
    def described(self) -> str:
        """Shapes, strides and dtypes of the output, as text: equal ones give the next layer equal traces."""
        return _described(self.output)


@dataclass(frozen=True)
class KnownTraces:
    """Cache of the traces of layers and losses that several calls of `trace_model` share."""

    layers: dict[Hashable, TracedLayer] = field(default_factory=dict)
    runs: dict[Hashable, InferredLayer] = field(default_factory=dict)
    losses: dict[Hashable, TracedLoss] = field(default_factory=dict)


def _trace_layers(copies: MetaCopies, share: ContextShare, known: KnownTraces) -> list[TracedLayer]:
    """Return the trace of each layer, given the layer before's output; those that run alike share a trace."""
    blueprint = copies.blueprint
    meta_layers = blueprint.meta_layers(copies.tensor_parallel, FIRST, {})
    structures = [
        (structure, blueprint.float8.within(layer.path))
        for structure, layer in zip(meta_layers.structures, blueprint.sequence.layers, strict=True)
    ]
    compiler = LayerCompiler.for_estimates(copies.queue) if blueprint.plan.compile else None
    given, value = LayerInput.of_batch(share.inputs, input_gradients=False), share.inputs
    described = _described(value)
    held = _held(share.sequence)
    traced: list[TracedLayer] = []
    for number, structure in enumerate(structures):
        recompute = blueprint.recompute[number]
        alike = structure, given.length, given.repeats, described, held
        key = alike, recompute
        if key not in known.layers:
            layer = copies.layer(number)
            if alike not in known.runs or any(_caches(layer)):
                with running(share.sequence), RememberedResults():
                    known.runs[alike], _ = run_on_meta(layer, given)  # fills the layer's caches, too
            run = known.runs[alike]
            compiled = None if compiler is None else compiler.compiled(layer, structure, recompute)
            info = replace(run.info, regions_in_float8=meta_layers.regions_in_float8(number, given))
            known.layers[key] = _traced_layer(copies, layer, recompute, compiled, run, info, value, share)
        traced.append(known.layers[key])
        given, value = traced[-1].run.next_input(), traced[-1].output
        described = traced[-1].described
    return traced


def _traced_layer(
    copies: MetaCopies,
    layer: NamedLayer,
    recompute: Recompute,
    compiled: CompiledLayer | None,
    run: InferredLayer,
    info: LayerInfo,
    value: Value,
    share: ContextShare,
) -> TracedLayer:
    """Run a layer for the input `value`, forward and backward, and return what it allocates and saves.

    `run`: a run of it before; `info`: its own, as a stage needs it.
    """
    recorder, on_cpu, sequence = copies.recorder, copies.on_cpu, share.new_sequence()
    stage = Stage(0, [layer], copies.queue, [[info]], [recompute], sequences=[sequence])
    by_graphs = compiled is not None and _run_compiled(stage, compiled, value)
    if recompute == "selective" and not by_graphs:
        trace_layer(stage, value, on_cpu=on_cpu)  # what to keep is known from the first backward
    kept = [one for *_, one in _caches(layer) if isinstance(one, MatrixCasts) and one.keeps_weights]
    _forget(kept)
    trace, output = trace_layer(stage, value, recorder, on_cpu=on_cpu)
    first_work = work = None if recorder is None else recorder.take(recompute)
    if kept and recorder is not None:
        trace_layer(stage, value, recorder, on_cpu=on_cpu)  # with the casts of the first run
        work = recorder.take(recompute)
    if any(experts_in(layer.module)):  # whose operands and gradients are large
        _forget(kept)
        trace = replace(trace, whole_backward_peak=whole_backward_peak(stage, value, on_cpu=on_cpu))
    # Graphs compute what eager layers cache, but for factors of weights.
    cached = [
        CachedBytes(module, name, 0 if by_graphs and isinstance(cache, ResultCache) else cache.nbytes)
        for module, name, cache in _caches(layer)
    ]
    return TracedLayer(run, trace, output, cached, sequence, work, first_work)


def _forget(kept: Sequence[MatrixCasts]) -> None:
    """Clear the casts of experts' matrices, so that the next run makes them, as a step's first does."""
    for casts in kept:
        casts.begin_step()


def _held(sequence: LocalSequence | None) -> Hashable:
    """Return a key of the positions, and of their documents, that a rank holds."""
    return None if sequence is None else (sequence.layout, sequence.documents, sequence.group.index)


def _caches(layer: NamedLayer) -> Iterator[tuple[str, str, ResultCache | LinearCasts | MatrixCasts]]:
    """Yield the caches of a layer that outlive a step, with the names of their module and attribute.

    That is rotary angles, and factors of weights in float8.
    """
    yield from result_caches(layer.module)
    for path, module in layer.module.named_modules():
        yield from ((path, f"casts {number}", one) for number, one in enumerate(casts_of(module)))


def _cache_bytes(layer: NamedLayer, traced: TracedLayer) -> dict[Hashable, int]:
    """Return the bytes that a layer's caches hold, by a key that is the same for layers that share one."""
    found: dict[Hashable, int] = {}
    for path, name, nbytes in traced.cached:
        module = layer.module.get_submodule(path)
        held = vars(module).get(name)
        found[id(held) if isinstance(held, ResultCache) else (id(module), name)] = nbytes
    return found


def _described(value: Value) -> str:
    """Return shapes, strides, dtypes and `requires_grad` of a value's tensors, and which share memory."""
    seen: dict[int, int] = {}

    def described(one: Tensor) -> tuple[object, ...]:
        number = seen.setdefault(id(one.untyped_storage()), len(seen))
        return tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, one.requires_grad, number

    return repr(map_tensors(described, value))


def _run_compiled(stage: Stage, compiled: CompiledLayer, given: Value) -> bool:
    """Run a one-layer stage by its graphs from now on; return False, leaving it eager, where they cannot.

    Traces the layer for inputs like `given`, which must not happen while storages are tracked.
    """
    stage.run_compiled([compiled])
    stage.values[0] = map_tensors(meta_leaf, given)
    try:
        with torch.enable_grad():
            stage.forward(0, 0)
    except Exception:
        stage.run_compiled([])
    stage.clear()
    return bool(stage.compiled)


def _tensor_parallel(
    blueprint: Blueprint, recorder: OperationRecorder | None, *, takes_all: bool
) -> TensorParallelism:
    """Return how layers are divided over groups of ranks that do not exist."""
    plan = blueprint.plan
    experts = group_on_meta("ep_etp", plan.ep * plan.etp, 0, recorder) if plan.divides_experts else None
    made = blueprint.tensor_parallel(group_on_meta("tp", plan.tp, 0, recorder), experts)
    if not takes_all or made.experts is None:
        return made
    return replace(made, experts=replace(made.experts, takes_all=True))


@dataclass(frozen=True)
class MetaCopies:
    """Makes copies of a model's layers on the meta device, each by itself, with a rank's shapes."""

    blueprint: Blueprint
    tensor_parallel: TensorParallelism
    queue: WeightGradientQueue
    recorder: OperationRecorder | None
    on_cpu: bool
    """Whether layers would run on a CPU."""
    _copies: dict[int, NamedLayer] = field(default_factory=dict)

    def layer(self, number: int) -> NamedLayer:
        """Return the copy of layer `number` on the meta device, with gradients; each is made once."""
        if number not in self._copies:
            self._copies[number] = self._made(self.blueprint.sequence.layers[number])
        return self._copies[number]

    def _made(self, original: NamedLayer) -> NamedLayer:
        blueprint, sequence, queue = self.blueprint, self.blueprint.sequence, self.queue
        own = {id(one) for one in original.module.parameters()}
        parameters = {name: one for name, one in sequence.parameters.items() if id(one) in own}
        shapes = {name: blueprint.whole_layouts[name].local_shape(FIRST) for name in parameters}
        alone = replace(sequence, layers=(original,), parameters=parameters)
        empty = on_meta(alone, DTYPES[blueprint.plan.precision], shapes)
        scales = dict[int, Tensor]()
        for name, parameter in parameters.items():
            meta, kind = empty[id(parameter)], blueprint.kinds[name]
            if kind.scaled:
                meta.data = meta.data.to(torch_dtype(kind.gather))
                scales[id(meta)] = torch.empty((), device="meta")
            if parameter.requires_grad:
                meta.grad_dtype = None
                meta.grad = torch.empty_like(meta, dtype=torch_dtype(kind.gradient))
        (layer,) = self.tensor_parallel.apply(private_copy([original], empty), queue)
        if self._float8 is not None:
            on_parts = self.tensor_parallel.sequence_dims[layer.path].input is not None
            self._float8.apply(layer, queue, scales, on_parts=on_parts)
        defer_weight_gradients(layer.module, queue)
        return layer

    @cached_property
    def _float8(self) -> Float8Layers | None:
        plan = self.blueprint.plan
        groups = (group_on_meta(axis, getattr(plan, axis), 0, self.recorder) for axis in ("cp", "etp"))
        return self.blueprint.float8_layers(self.tensor_parallel.group, *groups)


def _bytes(value: Value) -> list[int]:
    return [tensor.nbytes for tensor in tensors_of(value)]
