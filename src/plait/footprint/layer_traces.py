"""Memory traces of all layers of a model and of its loss, for one micro-batch shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.autograd.weight_gradient_queue import WeightGradientQueue
from plait.blueprint import Blueprint, storage_policy
from plait.comm.group import Group
from plait.comm.traffic import Traffic
from plait.footprint.traces import Trace, trace_layer, trace_loss
from plait.layers.layer_sequence import NamedLayer, on_meta, private_copy
from plait.layers.nested import Value, map_tensors, tensors_of
from plait.layers.precision import DTYPES
from plait.layers.shape_inference import LayerInfo, infer
from plait.pipeline.stage import Stage
from plait.tensor.losses import Loss, loss_of_pieces
from plait.tensor.tensor_parallelism import TensorParallelism


@dataclass(frozen=True)
class ModelTraces:
    """The traces of a model's layers, in order, and of its loss."""

    layers: Sequence[Trace]
    infos: Sequence[LayerInfo]
    loss: Trace
    output_copy: int
    """Bytes of a copy of the output for the loss; 0 where it is not copied."""
    inputs: Sequence[int]
    """Bytes of each tensor of the input."""
    targets: Sequence[int]


def trace_model(blueprint: Blueprint, microbatch: Value, targets: Value | None, loss: Loss) -> ModelTraces:
    """Return the traces on the first rank of `tp`, which has the largest pieces. Errors as for `infer`.

    Without `targets` there is a class for each row of the output.
    """
    queue = WeightGradientQueue()
    tensor_parallel = blueprint.tensor_parallel(
        Group("tp", tuple(range(blueprint.plan.tp)), 0, None, Traffic(), 0.0)
    )
    layers = _layers_on_meta(blueprint, tensor_parallel, queue)
    given = value = map_tensors(lambda tensor: as_input(tensor, DTYPES[blueprint.plan.precision]), microbatch)
    infos = infer(layers, given, input_gradients=False)
    adds_late = blueprint.lowering_spec.sharding.scatters == "each"
    traces = []
    for layer, info, recompute in zip(layers, infos, blueprint.recompute, strict=True):
        stage = Stage(0, [layer], queue, [[info]], adds_late, [recompute])
        if recompute == "selective":
            trace_layer(stage, value)  # what to keep is known from the first backward
        trace, value = trace_layer(stage, value)
        traces.append(trace)
    vocabulary = tensor_parallel.vocabulary_of(blueprint.sequence.layers[-1])
    tensor_loss = loss if vocabulary is None else loss_of_pieces(loss, vocabulary)
    copies = vocabulary is not None and traces[-1].output_is_read
    classes = (
        _classes_like(value)
        if targets is None
        else map_tensors(lambda tensor: as_input(tensor, None), targets)
    )
    return ModelTraces(
        traces,
        infos,
        trace_loss(tensor_loss, value, classes),
        sum(_bytes(value)) if copies else 0,
        _bytes(given),
        _bytes(classes),
    )


def _layers_on_meta(
    blueprint: Blueprint, tensor_parallel: TensorParallelism, queue: WeightGradientQueue
) -> list[NamedLayer]:
    """Return all layers on the meta device, as a rank runs them, with allocated gradients."""
    coordinate = {"replicate": 0, "shard": 0, "tp": 0}
    shapes = {name: layout.local_shape(coordinate) for name, layout in blueprint.whole_layouts.items()}
    empty = on_meta(blueprint.sequence, DTYPES[blueprint.plan.precision], shapes)
    layers = tensor_parallel.apply(private_copy(blueprint.sequence.layers, empty), queue)
    policy = storage_policy(blueprint.plan)
    for layer in layers:
        defer_weight_gradients(layer.module, queue)
    for parameter in blueprint.sequence.parameters.values():
        if parameter.requires_grad:
            meta, dtype = empty[id(parameter)], policy.gradient_of(parameter)
            meta.grad_dtype = dtype
            meta.grad = torch.empty_like(meta, dtype=dtype)
    return layers


def as_input(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    """Return a meta input after the engine's conversion: floating-point tensors in the plan's precision."""
    dtype = precision if tensor.is_floating_point() else None
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def _classes_like(output: Value) -> Value:
    """Return meta targets with one class number per row of the output."""
    return map_tensors(lambda tensor: tensor.new_empty(tensor.shape[:-1], dtype=torch.int64), output)


def _bytes(value: Value) -> list[int]:
    return [tensor.nbytes for tensor in tensors_of(value)]
