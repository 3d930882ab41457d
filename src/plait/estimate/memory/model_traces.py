"""`trace_model`: the memory that each layer of a model and its loss allocate and save, on the meta device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from plait.engine.blueprint import Blueprint
from plait.engine.compilation.compiled_layer import CompiledLayer, LayerCompiler
from plait.engine.pipeline.loss_stage import ChunkedLossStage, build_loss_stage
from plait.engine.pipeline.stage import Stage
from plait.estimate.memory.context_inputs import (
    ContextShare,
    as_input,
    as_input_batch,
    context_share,
    lasting_bytes,
    method_choices,
    result_bytes,
)
from plait.estimate.memory.layer_traces import (
    Trace,
    meta_leaf,
    trace_chunked_loss,
    trace_layer,
    trace_loss,
    whole_backward_peak,
)
from plait.estimate.memory.operation_recorder import OperationRecorder, group_on_meta, with_loss
from plait.estimate.time.layer_work import LayerWork
from plait.models.layers.layer_sequence import on_meta, private_copy
from plait.models.layers.shape_inference import InferredLayer, LayerInfo, LayerInput, run_on_meta
from plait.models.rotary import ResultCache, result_caches
from plait.plan.axes import AXES, EXPERTS_ONLY
from plait.tensor.attention.ulysses import MethodChoice
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.float8_operands import LinearCasts
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.expert_casts import MatrixCasts
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.layer_values import DTYPES, NamedLayer, Value, map_tensors, tensors_of, torch_dtype
from plait.tensor.losses import Loss
from plait.tensor.parallel.apply_float8 import casts_in
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


def trace_model(
    blueprint: Blueprint,
    microbatch: Value,
    targets: Value | None,
    loss: Loss,
    recorder: OperationRecorder | None = None,
    known: dict[Hashable, TracedLayer] | None = None,
    *,
    takes_all: bool = False,
) -> ModelTraces:
    """Return the memory that each layer and the loss allocate and save on the first rank of `tp`.

    Layers of equal structure that read equal inputs are traced once. The rank has the largest shards; which
    rank of `cp` it is, see `context_share`. Raises ModelError where a layer does not run on meta.
    Without `targets` there is a class for each row of the output. `recorder`: records operations, too.
    `known`: traces of plans that differ in `ep`, `etp`, `recompute` and rows only; those of layers that run
    alike are taken from it, and others added. `takes_all`: whether all tokens have the experts of this rank;
    else as many as under uniform routing.
    """
    queue = WeightGradientQueue(blueprint.lowering_spec.adds_late)
    tensor_parallel = _tensor_parallel(blueprint, recorder, takes_all=takes_all)
    layers = _layers_on_meta(blueprint, tensor_parallel, queue, recorder)
    vocabulary = tensor_parallel.vocabulary_of(blueprint.sequence.layers[-1])
    end = build_loss_stage(blueprint, loss, vocabulary, layers[-1], queue)
    share = context_share(
        blueprint.plan, as_input_batch(microbatch, DTYPES[blueprint.plan.precision]), targets, recorder
    )
    known = {} if known is None else known
    traced = _trace_layers(blueprint, tensor_parallel, layers, queue, share, recorder, known)
    value = traced[-1].output
    traces = [one.trace for one in traced]
    copies = end.writes_output and traces[-1].output_is_read
    classes = share.targets
    if classes is None:
        classes = map_tensors(lambda one: one.new_empty(one.shape[:-1], dtype=torch.int64), value)
    classes = map_tensors(lambda tensor: as_input(tensor, None), classes)
    if isinstance(end, ChunkedLossStage):
        of_loss = trace_chunked_loss(end, queue, value, classes, recorder)
    else:
        of_loss = trace_loss(end, value, classes, recorder)
    works = [one.work for one in traced if one.work is not None]
    if recorder is not None:
        works[-1] = with_loss(works[-1], recorder.take(fuses=False))
    return ModelTraces(
        traces,
        [one.run.info for one in traced],
        of_loss,
        sum(_bytes(value)) if copies else 0,
        _bytes(share.inputs),
        _bytes(classes),
        [_cache_bytes(layer, one) for layer, one in zip(layers, traced, strict=True)],
        [lasting_bytes(one.sequence) for one in traced],
        [result_bytes(one.sequence) for one in traced],
        share.uncut_beside(classes),
        frozenset(chain.from_iterable(method_choices(one.sequence) for one in traced)),
        works,
    )


@dataclass(frozen=True)
class TracedLayer:
    """What a run of a layer on the meta device showed; layers of equal structure and inputs share it."""

    run: InferredLayer
    trace: Trace
    output: Value
    cached: Sequence[int]
    """The bytes of each of its caches, in the order of `_caches`."""
    sequence: LocalSequence | None
    """The sequence for which it ran, with what it computed to share."""
    work: LayerWork | None
    """None where operations are not recorded."""


def _trace_layers(
    blueprint: Blueprint,
    tensor_parallel: TensorParallelism,
    layers: Sequence[NamedLayer],
    queue: WeightGradientQueue,
    share: ContextShare,
    recorder: OperationRecorder | None,
    known: dict[Hashable, TracedLayer],
) -> list[TracedLayer]:
    """Return the trace of each layer, given the layer before's output; those that run alike share a trace."""
    meta_layers = blueprint.meta_layers(tensor_parallel, FIRST, {})
    structures = [
        (structure, blueprint.float8.within(layer.path))
        for structure, layer in zip(meta_layers.structures, layers, strict=True)
    ]
    compiled = _compiled_layers(blueprint, structures, layers, queue)
    given, value = LayerInput.of_batch(share.inputs, input_gradients=False), share.inputs
    held = _held(share.sequence)
    traced: list[TracedLayer] = []
    for number, layer in enumerate(layers):
        recompute = blueprint.recompute[number]
        key = structures[number], recompute, given.length, given.repeats, _described(value), held
        if key not in known:
            with running(share.sequence):
                run, _ = run_on_meta(layer, given)  # fills the layer's caches, too
                regions = meta_layers.regions_in_float8(number, given)
            sequence = share.new_sequence()
            info = replace(run.info, regions_in_float8=regions)
            stage = Stage(0, [layer], queue, [[info]], [recompute], sequences=[sequence])
            by_graphs = bool(compiled) and _run_compiled(stage, compiled[number], value)
            if recompute == "selective" and not by_graphs:
                trace_layer(stage, value)  # what to keep is known from the first backward
            kept = [one for one in _caches(layer) if isinstance(one, MatrixCasts) and one.keeps_weights]
            _forget(kept)
            trace, output = trace_layer(stage, value, recorder)
            if any(experts_in(layer.module)):  # whose operands and gradients are large
                _forget(kept)
                trace = replace(trace, whole_backward_peak=whole_backward_peak(stage, value))
            work = None if recorder is None else recorder.take(recompute)
            # Graphs compute what eager layers cache, but for factors of weights.
            cached = [
                0 if by_graphs and isinstance(one, ResultCache) else one.nbytes for one in _caches(layer)
            ]
            known[key] = TracedLayer(run, trace, output, cached, sequence, work)
        traced.append(known[key])
        given, value = known[key].run.next_input(), known[key].output
    return traced


def _forget(kept: Sequence[MatrixCasts]) -> None:
    """Let the next run cast the matrices of experts, as in a step's first micro-batch, which takes most."""
    for casts in kept:
        casts.begin_step()


def _held(sequence: LocalSequence | None) -> Hashable:
    """Return a key of which positions, of which documents, a rank holds."""
    return None if sequence is None else (sequence.layout, sequence.documents, sequence.group.index)


def _caches(layer: NamedLayer) -> list[ResultCache | LinearCasts | MatrixCasts]:
    """Return what holds results of a layer after a step: rotary angles, factors of weights in float8."""
    return [*result_caches(layer.module), *casts_in(layer.module)]


def _cache_bytes(layer: NamedLayer, traced: TracedLayer) -> dict[Hashable, int]:
    """Return the bytes that a layer's caches hold, by a number of the cache."""
    caches = _caches(layer) if traced.cached else ()
    return {id(cache): nbytes for cache, nbytes in zip(caches, traced.cached, strict=True)}


def _compiled_layers(
    blueprint: Blueprint,
    structures: Sequence[Hashable],
    layers: Sequence[NamedLayer],
    queue: WeightGradientQueue,
) -> list[CompiledLayer]:
    """Return a compiled layer for each layer; an empty list where the plan compiles nothing."""
    if not blueprint.plan.compile:
        return []
    compiler = LayerCompiler.for_estimates(queue)
    return [
        compiler.compiled(layer, structure, recompute)
        for layer, structure, recompute in zip(layers, structures, blueprint.recompute, strict=True)
    ]


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


def _layers_on_meta(
    blueprint: Blueprint,
    tensor_parallel: TensorParallelism,
    queue: WeightGradientQueue,
    recorder: OperationRecorder | None,
) -> list[NamedLayer]:
    """Return copies of all layers on the meta device, with a rank's shapes and allocated gradients."""
    shapes = {name: layout.local_shape(FIRST) for name, layout in blueprint.whole_layouts.items()}
    empty = on_meta(blueprint.sequence, DTYPES[blueprint.plan.precision], shapes)
    scales = dict[int, Tensor]()
    for name, parameter in blueprint.sequence.parameters.items():
        meta, kind = empty[id(parameter)], blueprint.kinds[name]
        if kind.scaled:
            meta.data = meta.data.to(torch_dtype(kind.gather))
            scales[id(meta)] = torch.empty((), device="meta")
        if parameter.requires_grad:
            meta.grad_dtype = None
            meta.grad = torch.empty_like(meta, dtype=torch_dtype(kind.gradient))
    layers = tensor_parallel.apply(private_copy(blueprint.sequence.layers, empty), queue)
    float8 = blueprint.float8_layers(
        tensor_parallel.group,
        *(group_on_meta(axis, getattr(blueprint.plan, axis), 0, recorder) for axis in ("cp", "etp")),
    )
    for layer in layers:
        if float8 is not None:
            on_parts = tensor_parallel.sequence_dims[layer.path].input is not None
            float8.apply(layer, queue, scales, on_parts=on_parts)
        defer_weight_gradients(layer.module, queue)
    return layers


def _bytes(value: Value) -> list[int]:
    return [tensor.nbytes for tensor in tensors_of(value)]
