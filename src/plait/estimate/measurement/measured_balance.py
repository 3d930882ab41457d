"""`balance`: cut a model into stages by the measured times of its layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from plait.engine.blueprint import Blueprint, build_blueprint
from plait.engine.local_batch import cut, local_inputs
from plait.engine.parallelize import layer_groups
from plait.engine.pipeline.loss_stage import LossStage, build_loss_stage
from plait.engine.pipeline.stage import Gradients, Stage
from plait.models.layers.layer_sequence import buffer_dtype, private_copy
from plait.models.layers.shape_inference import LayerInfo
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.accelerator import synchronize
from plait.ranks.consistency_check import require_same_text
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import broadcast_text
from plait.schedules.search.stage_cuts import LayerCosts, schedule_and_cut
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dtypes import DTYPES, convert
from plait.tensor.losses import Loss, cross_entropy
from plait.tensor.microbatches import split_both
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, leaf_of, map_tensors, signature, tensors_of
from plait.tensor.parallel.tensor_parallelism import TensorParallelism
from plait.tensor.running_sequence import ContextParallelism, running
from plait.tensor.torch_losses import GivenLoss, as_loss

REPEATS = 5
"""Timed runs of each layer, of which the median counts; one untimed run precedes them."""
SPREAD = 0.02
"""Standard deviation of the random parameters; times hardly depend on it."""


def balance(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    inputs: Value,
    targets: Value,
    loss: GivenLoss = cross_entropy,
    *,
    rules: Rules | None = None,
) -> Plan:
    """Return `plan` with `layers_per_stage` set from the times of the layers on this mesh.

    `inputs` and `targets` are as in `Engine.forward_backward`; their first micro-batch runs through the
    model, layer by layer, a few times, on every rank at once, with one layer's parameters in memory at a
    time. The times of rank 0 count. Communication: what layers send over `cp` and `tp`, the batch's shapes
    (256 bytes) and the costs as text over `world`. Raises what `parallelize` would.
    """
    mesh.check_plan(plan)
    blueprint = build_blueprint(model, plan, rules)
    batch, parts = split_both(inputs, targets, plan.microbatches, (_same, _same))
    given, wanted = batch[0], parts[0]
    looks = f"balance on micro-batches of {signature(given)} with targets {signature(wanted)}"
    require_same_text(looks, mesh.group("world"), mesh.group("world").device_for_text(mesh.device))
    mine = measured_costs(blueprint, mesh, given, wanted, as_loss(loss))
    text = broadcast_text(json.dumps([mine.F, mine.I, mine.W]), mesh.group("world"), mesh.device)
    forward, backward, weights = map(tuple, json.loads(text))
    costs = LayerCosts(forward, backward, weights)
    _, counts = schedule_and_cut(
        plan.schedule,
        costs.with_messages(plan.pp),
        ranks=plan.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        limit=plan.memory_limit,
    )
    return replace(plan, layers_per_stage=counts)


def measured_costs(blueprint: Blueprint, mesh: Mesh, given: Value, targets: Value, loss: Loss) -> LayerCosts:
    """Measure the seconds of each layer's forward, input gradient and weight gradient on this rank.

    The last layer includes the loss. All ranks of `cp` and `tp` measure at once. Communication: the layers'
    collectives over `cp` and `tp`.
    """
    tensor_parallel = blueprint.tensor_parallel(*layer_groups(mesh))
    local = local_inputs([given], ContextParallelism.of(blueprint.plan, mesh.group("cp")))
    (value,), (sequence,) = local.values, local.sequences
    dtype = DTYPES[blueprint.plan.precision]
    value = map_tensors(
        lambda tensor: tensor.to(mesh.device, dtype if tensor.is_floating_point() else None), value
    )
    layers = blueprint.meta_layers(tensor_parallel, mesh.coordinate, mesh.shared_results)
    with running(sequence):
        infos = layers.infer(value, input_gradients=True)
    wanted = map_tensors(lambda tensor: tensor.to(mesh.device), cut(targets, sequence, "targets"))
    rows = []
    for number, layer in enumerate(blueprint.sequence.layers):
        stage = _stage_of(layer, infos[number], blueprint, tensor_parallel, mesh)
        stage.sequences = [sequence]
        end = None
        if number == len(infos) - 1:
            vocabulary = tensor_parallel.vocabulary_of(layer)
            end = build_loss_stage(blueprint, loss, vocabulary, stage.layers[0], stage.queue)
        runs = [_run(stage, value, end, wanted, _clock(mesh.device)) for _ in range(1 + REPEATS)]
        rows.append([median(times) for times in zip(*(times for _, times in runs[1:]), strict=True)])
        value = runs[-1][0]
    forward, inputs, weights = (tuple(column) for column in zip(*rows, strict=True))
    return LayerCosts(forward, inputs, weights)


def _stage_of(
    layer: NamedLayer, info: LayerInfo, blueprint: Blueprint, tensor_parallel: TensorParallelism, mesh: Mesh
) -> Stage:
    """Return a stage of `layer` alone, sharded as on this rank of `tp`, with random parameters."""
    dtype, tensors = DTYPES[blueprint.plan.precision], dict[int, Tensor]()
    names = {id(parameter): name for name, parameter in blueprint.sequence.parameters.items()}
    for parameter in layer.module.parameters():
        shape = blueprint.whole_layouts[names[id(parameter)]].local_shape(mesh.coordinate)
        like = convert(parameter.detach().new_empty(0, device="meta"), dtype, torch.device("meta"))
        values = torch.empty(tuple(shape), dtype=like.dtype, device=mesh.device).normal_(std=SPREAD)
        tensors[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for name, buffer in layer.module.named_buffers():
        real = torch.zeros_like(buffer, device=mesh.device) if buffer.is_meta else buffer
        tensors[id(buffer)] = convert(real, buffer_dtype(layer.module, name, dtype), mesh.device)
    queue = WeightGradientQueue()
    (copy,) = tensor_parallel.apply(private_copy([layer], tensors), queue)
    defer_weight_gradients(copy.module, queue)
    for parameter in copy.module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    place = blueprint.sequence.layers.index(layer)
    return Stage(0, [copy], queue, [[info]], recompute=[blueprint.recompute[place]])


def _run(
    stage: Stage, given: Value, end: LossStage | None, targets: Value, clock: Callable[[], float]
) -> tuple[Value, tuple[float, float, float]]:
    """Run a one-layer stage; return its output, and the seconds of forward, input and weight gradient.

    `end`: the loss stage after the last layer, whose times count.
    """
    with torch.enable_grad():
        stage.values[0] = map_tensors(lambda tensor: leaf_of(tensor, tensor.is_floating_point()), given)
        start = clock()
        stage.forward(0, 0)
        output = stage.values.pop(0)
        if end is not None:
            end.begin([targets], torch.ones((), dtype=torch.float64, device=next(tensors_of(output)).device))
            end.compute(0, map_tensors(lambda leaf: leaf_of(leaf.clone(), leaf.requires_grad), output))
        forward = clock()
        seeds: Gradients = [
            torch.ones_like(tensor) if tensor.requires_grad else None for tensor in tensors_of(output)
        ]
        begun = clock()
        stage.gradients[0] = seeds if end is None else end.seed(0)
        stage.backward_input(0, 0)
        inputs = clock()
        stage.backward_weight(0, 0)
        weights = clock()
        stage.clear()
    return map_tensors(Tensor.detach, output), (forward - start, inputs - begun, weights - inputs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device before each reading."""

    def read() -> float:
        synchronize(device)
        return perf_counter()

    return read
