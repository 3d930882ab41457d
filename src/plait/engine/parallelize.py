"""`parallelize`: builds an engine from a model, a plan and a mesh.

model ┐
      ├ blueprint ─ programs, units, stages ┐
plan  ┘                                     ├→ Engine
mesh  ─ groups ─────────────────────────────┘
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from plait.engine.blueprint import Blueprint, chosen_rules, shared_blueprint
from plait.engine.build_router_balance import build_step_balance
from plait.engine.compilation.compiled_layer import LayerCompiler
from plait.engine.engine import Engine
from plait.engine.fingerprint import fingerprint, lines_of_values
from plait.engine.pipeline.loss_stage import build_loss_stage
from plait.engine.pipeline.pipeline_rank import PipelineRank
from plait.engine.pipeline.stage import Stage
from plait.engine.pipeline.stage_exchange import Exchange
from plait.engine.runner import Runtime
from plait.engine.sharding.gradient_norm import counted_parameters
from plait.engine.sharding.unit import Unit, UnitFactory, reduction_groups
from plait.engine.tensor_sources import LocalSource, RankZeroSource, TensorSource, locate_tensors
from plait.errors import ModelError, PlanError, listed
from plait.models.layers.comparable_value_text import DIFFERS_BY_RANK
from plait.models.layers.layer_sequence import (
    LayerSequence,
    buffer_dtype,
    copy_attributes,
    private_copy,
    sequence_of,
)
from plait.models.layers.model_validation import LateHooks, refuse_compiled_loss, refuse_lost_settings
from plait.plan.argument_checks import require_flag, require_instance, require_whole
from plait.plan.layout.shards import shard
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.proof.layer_runs_on_meta import MetaLayers
from plait.ranks.accelerator import is_accelerator, multiplies_float8
from plait.ranks.consistency_check import different_texts, require_same_text
from plait.ranks.group import Group, alone
from plait.ranks.mesh import Mesh
from plait.ranks.rank_device import device_change
from plait.schedules.lowering.messages import channels_of
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import DropoutGenerator
from plait.tensor.dtypes import DTYPES, convert
from plait.tensor.experts.router_losses_of_step import StepBalance
from plait.tensor.float8.recipes import RECIPES
from plait.tensor.losses import Loss
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.tensor_parallelism import TensorParallelism, named
from plait.tensor.running_sequence import ContextParallelism
from plait.tensor.torch_losses import GivenLoss, as_loss


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    loss: GivenLoss,
    *,
    rules: Rules | None = None,
    seed: int = 0,
    values: Mapping[str, Tensor] | None = None,
    broadcast: bool = False,
) -> Engine:
    """Return an engine of `model` over the ranks of `mesh`; all ranks call it with the same arguments.

    The model (best an `nn.Sequential`, nested ones are flattened) is not changed. Parameters with values keep
    them; those on the meta device get values that depend on their name, `seed` and global index only.
    `values` replace the model's own: one for each name in `model.state_dict()`, read one at a time. With
    `broadcast` rank 0's values are used on all ranks. `rules` say which modules are partitioned over `tp`, by
    default the model's own, `model.rules`. `loss` has `total` and `weight`, or is one of PyTorch's, or a
    function within `plait.tensor.mean_loss`: see `as_loss`.

    Communication, once: the ranks compare model, plan, loss, environment and values (256 bytes each), make
    groups for messages, tied parameters and repeated heads, and map each other's gradients on one host; with
    `broadcast` every parameter and buffer goes over `world`. Raises PlanError, MeshError, ModelError or
    ScheduleError before anything runs, ModelError also where ranks have different values without
    `broadcast`, and CommunicationError where anything else differs that `differs_by_rank` does not name.
    """
    _require_arguments(plan, mesh, loss, rules, seed, values, broadcast)
    refuse_unavailable(plan, mesh.device)
    return build_engine(model, plan, mesh, loss, rules=rules, seed=seed, values=values, broadcast=broadcast)


def refuse_unavailable(plan: Plan, device: torch.device) -> None:
    """Raise PlanError for CUDA graphs where `device` is no GPU."""
    if plan.cuda_graphs and not is_accelerator(device):
        raise PlanError(
            f"plan.cuda_graphs is True, but this rank computes on {device}, which has no CUDA graphs: leave "
            "plan.cuda_graphs out."
        )


def build_engine(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    loss: GivenLoss,
    *,
    rules: Rules | None = None,
    seed: int = 0,
    values: Mapping[str, Tensor] | None = None,
    broadcast: bool = False,
) -> Engine:
    """Return the engine of `parallelize`, also for a plan that it refuses for what the device lacks."""
    loss = as_loss(loss)
    refuse_lost_settings(model, loss)
    blueprint, sequence = shared_blueprint(model, plan, rules, mesh.shared_results), sequence_of(model)
    require_alike(model, blueprint, sequence, loss, mesh, {"seed": seed, "broadcast": broadcast})
    source = agreed_source(sequence, mesh, seed, values, broadcast=broadcast)
    return assemble_engine(model, blueprint, mesh, loss, source, rules=rules, seed=seed)


def assemble_engine(
    model: nn.Module,
    blueprint: Blueprint,
    mesh: Mesh,
    loss: Loss,
    source: TensorSource,
    *,
    rules: Rules | None,
    seed: int,
) -> Engine:
    """Return the engine of a blueprint of `model`, with values from `source`; all ranks agree on these."""
    plan, sequence = blueprint.plan, sequence_of(model)
    if plan.linears is not None and not multiplies_float8(mesh.device):
        raise PlanError(
            f"plan.linears is {plan.linears!r}, but {mesh.device} has no products in float8, which CUDA has "
            "from compute capability 8.9 on: leave plan.linears out."
        )
    spans = blueprint.layers_of(mesh.index("pp"))
    units = build_units(blueprint, spans, mesh, source)
    dropout, queue = DropoutGenerator(seed), WeightGradientQueue(blueprint.lowering_spec.adds_late)
    parallel, balance = blueprint.tensor_parallel(*layer_groups(mesh)), build_step_balance(blueprint, mesh)
    stages = build_stages(blueprint, sequence, spans, units, parallel, mesh, source, dropout, queue, balance)
    meta_layers = blueprint.meta_layers(parallel, mesh.coordinate, mesh.shared_results)
    compile_layers(stages, blueprint, meta_layers, queue)
    vocabulary = parallel.vocabulary_of(blueprint.sequence.layers[-1])
    loss_stage = build_loss_stage(blueprint, loss, vocabulary, last_layer(stages, blueprint), queue)
    exchange = Exchange(mesh.index("pp"), mesh.channel_groups(channels_of(blueprint.schedule)), mesh.device)
    runtime = Runtime(
        blueprint=blueprint,
        mesh=mesh,
        loss=loss,
        pipeline=PipelineRank(stages, exchange, loss_stage, blueprint.layers_per_stage),
        units=units,
        queue=queue,
        context_parallelism=ContextParallelism.of(plan, mesh.group("cp"), queue.overlap),
        dropout=dropout,
        balance=balance,
        counted=counted_parameters(blueprint.owners, blueprint.layouts, mesh, blueprint.norm_axis),
        vocabulary=vocabulary,
        meta_layers=meta_layers,
        late_hooks=LateHooks(model),
        context=getattr(model, "context", None),
        rules=chosen_rules(model, rules),
    )
    return Engine(runtime, model.parameters())


def layer_groups(mesh: Mesh) -> tuple[Group, Group | None]:
    """Return this rank's groups along `tp`, and along `ep` × `etp`; None where experts are not divided."""
    return mesh.group("tp"), mesh.group(("ep", "etp")) if "ep" in mesh.sizes else None


def _require_arguments(
    plan: Plan,
    mesh: Mesh,
    loss: GivenLoss,
    rules: object,
    seed: object,
    values: object,
    broadcast: object,
) -> None:
    """Raise PlanError or MeshError for arguments of another type or out of range, and a compiled loss."""
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    require_instance("the mesh", mesh, Mesh, "give plait.Mesh(plan)", PlanError)
    mesh.check_plan(plan)
    if rules is not None:
        require_instance(
            "rules", rules, Mapping, "give a dictionary of rules by the paths of modules", PlanError
        )
    require_whole("seed", seed, PlanError, least=0)
    if values is not None:
        require_instance("values", values, Mapping, "give a dictionary of tensors by name", PlanError)
    require_flag("broadcast", broadcast, PlanError)
    refuse_compiled_loss(loss)


def warn_of_another_device(tensors: Iterable[Tensor], mesh: Mesh) -> None:
    """Warn on rank 0 where the model's tensors are moved to a device where its user may not expect them."""
    chosen_by_default = mesh.has_default_device and mesh.world == 1
    change = device_change((one.device for one in tensors), mesh.device, by_default=chosen_by_default)
    if change and mesh.rank == 0:
        warnings.warn(change, stacklevel=5)


def require_alike(
    model: nn.Module,
    blueprint: Blueprint,
    sequence: LayerSequence,
    loss: Loss,
    mesh: Mesh,
    options: Mapping[str, object],
) -> None:
    """Raise CommunicationError on every rank where ranks call `parallelize` with unlike arguments.

    The values of tensors aside, and attributes that `differs_by_rank` names.
    """
    text = fingerprint(
        model,
        sequence,
        blueprint.plan,
        blueprint.layers_per_stage,
        blueprint.schedule,
        blueprint.module_rules,
        loss,
        {"device": mesh.device.type, "guarded": mesh.guarded, **options},
    )
    remedy = (
        "give every rank the same model, loss, plan and environment, or name an attribute that may be unlike "
        f"in `{DIFFERS_BY_RANK}` of its class"
    )
    require_same_text(text, mesh.group("world"), mesh.device, doing="parallelize", remedy=remedy)


def agreed_source(
    sequence: LayerSequence, mesh: Mesh, seed: int, given: Mapping[str, Tensor] | None, *, broadcast: bool
) -> TensorSource:
    """Return the source of initial parameter and buffer values, which with `broadcast` are rank 0's.

    Raises ModelError where the values of a rank differ from rank 0's.
    """
    world = mesh.group("world")
    places = locate_tensors(named(sequence.layers))
    warn_of_another_device((place.tensor for place in places.values()), mesh)
    own = LocalSource(places, seed, given)
    if broadcast:
        return RankZeroSource(own, world, mesh.device)
    values = lines_of_values(own.known())
    versions = different_texts(values, world, mesh.device, about="the initial values")
    if versions:
        (first, _), *unlike = versions.items()
        others = sorted(rank for _, ranks in unlike for rank in ranks)
        raise ModelError(
            f"the model starts from other values on {'rank' if len(others) == 1 else 'ranks'} "
            f"{listed(list(map(str, others)))} than on rank 0, first in {first.partition(' = ')[0]}: give "
            "parallelize broadcast=True, and those of rank 0 count, or seed each rank alike "
            "(torch.manual_seed) before it builds the model."
        )
    return own


def build_units(
    blueprint: Blueprint, spans: Mapping[int, range], mesh: Mesh, source: TensorSource
) -> dict[str, Unit]:
    """Return by name this rank's `Unit`s (parameters gathered together); `source` may broadcast values."""

    def value_of(name: str) -> Tensor:
        whole, layout = source.read(name), blueprint.whole_layouts[name]
        return shard(whole, layout, mesh.coordinate) if layout.divides else whole

    kinds = blueprint.kinds.values()  # in one order on all ranks, as new groups require
    factory = UnitFactory(
        device=mesh.device,
        layouts=blueprint.layouts,
        coordinate=mesh.coordinate,
        shard_groups={kind.sharded_over: mesh.group(kind.sharded_over) for kind in kinds if kind.sharded},
        replica_groups=reduction_groups(blueprint.owners, blueprint.kinds, mesh),
        linears=None if blueprint.plan.linears is None else RECIPES[blueprint.plan.linears],
        tp_group=mesh.group("tp"),
        value_of=value_of,
    )
    units = {}
    for unit, specs in blueprint.buffer_specs.items():
        stages = blueprint.stages_with(unit, spans)
        if stages:
            units[unit] = factory.build(unit, specs, stages)
            for name, parameter in units[unit].shard_parameters.items():
                copy_attributes(blueprint.sequence.parameters[name], parameter)
        else:
            for name in (name for spec in specs for name in spec.names):
                source.skip(name)
        source.unit_built(unit, units.get(unit))
    return units


def build_stages(
    blueprint: Blueprint,
    sequence: LayerSequence,
    spans: Mapping[int, range],
    units: Mapping[str, Unit],
    tensor_parallel: TensorParallelism,
    mesh: Mesh,
    source: TensorSource,
    dropout: DropoutGenerator,
    queue: WeightGradientQueue,
    balance: StepBalance | None,
) -> dict[int, Stage]:
    """Return this rank's stages: copies of its layers, with parameters of `units`, buffers from `source`."""
    plan, etp = blueprint.plan, mesh.group("etp") if "etp" in mesh.sizes else alone("etp")
    float8 = blueprint.float8_layers(mesh.group("tp"), mesh.group("cp"), etp)
    mine = {number: [sequence.layers[layer] for layer in layers] for number, layers in spans.items()}
    buffers = read_buffers(sequence, chain.from_iterable(mine.values()), source, plan, mesh)
    stages = {}
    for number, layers in mine.items():
        real, scales = dict(buffers), dict[int, Tensor]()
        for unit in (unit for unit in units.values() if number in unit.stages):
            for name, parameter in unit.parameters_of(number).items():
                real[id(sequence.parameters[name])] = parameter
            scales |= unit.scales_of(number)
        # One copy of all layers of a stage, so that modules that they share stay shared.
        copies = tensor_parallel.apply(private_copy(layers, real), queue)
        for layer in copies:
            if float8 is not None:
                on_parts = tensor_parallel.sequence_dims[layer.path].input is not None
                float8.apply(layer, queue, scales, on_parts=on_parts)
            defer_weight_gradients(layer.module, queue)
        dropout.attach_to(layer.module for layer in copies)
        if balance is not None:
            balance.attach_to(copies)
        recompute = [blueprint.recompute[layer] for layer in spans[number]]
        stages[number] = Stage(number, copies, queue, recompute=recompute, dropout=dropout, balance=balance)
    return stages


def last_layer(stages: Mapping[int, Stage], blueprint: Blueprint) -> NamedLayer | None:
    """Return this rank's copy of the model's last layer; None on ranks of other stages."""
    stage = stages.get(len(blueprint.stage_layers) - 1)
    return None if stage is None else stage.layers[-1]


def compile_layers(
    stages: Mapping[int, Stage], blueprint: Blueprint, meta_layers: MetaLayers, queue: WeightGradientQueue
) -> None:
    """Replace the forward of this rank's layers in training by compiled graphs, if the plan has `compile`."""
    mode = blueprint.plan.compile
    if not mode:
        return
    compiler = LayerCompiler(queue, generates=mode != "graphs", falls_back=mode == "where possible")
    for number, stage in stages.items():
        numbers = blueprint.stage_layers[number]
        stage.run_compiled(
            [
                compiler.compiled(
                    layer,
                    (meta_layers.structures[index], blueprint.float8.within(layer.path)),
                    blueprint.recompute[index],
                )
                for layer, index in zip(stage.layers, numbers, strict=True)
            ]
        )


def read_buffers(
    sequence: LayerSequence, mine: Iterable[NamedLayer], source: TensorSource, plan: Plan, mesh: Mesh
) -> dict[int, Tensor]:
    """Return this rank's buffers, keyed by `id` of the model's; `source` may broadcast them from rank 0."""
    held = {id(buffer) for layer in mine for buffer in layer.module.buffers()}
    read = {}
    for name, place in locate_tensors(named(sequence.layers)).items():
        if place.is_buffer and id(place.tensor) in held:
            dtype = buffer_dtype(place.layer, place.name, DTYPES[plan.precision]) or place.tensor.dtype
            read[id(place.tensor)] = convert(source.read(name), dtype, mesh.device)
        elif place.is_buffer:
            source.skip(name)
    return read
