"""`parallelize`: the only place where the parts meet.

model ─ sequence of layers ─ cut into stages ┐
plan  ─ schedule ─ checked ─ lowered ────────┼→ Engine
mesh  ─ groups ──────────────────────────────┘
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from plait.autograd.deferred import Keeper, defer_weight_gradients
from plait.comm.agreement import agree
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.engine import Engine, Parts
from plait.errors import PlanError
from plait.layout import Layout, shard
from plait.models.initial import initial_value
from plait.pipeline.cost import layer_costs
from plait.pipeline.exchange import Exchange
from plait.pipeline.loss_end import LossEnd
from plait.pipeline.precision import DTYPES, convert
from plait.pipeline.refusals import refuse_layout_dependence
from plait.pipeline.sequence import (
    LayerSequence,
    bits_of,
    on_meta,
    private_copy,
    sequence_of,
)
from plait.pipeline.stage import Stage
from plait.pipeline.worker import Worker
from plait.plan import Plan
from plait.planner.cut import shortest_cut
from plait.schedules.lower import Place, Shape
from plait.schedules.policies import schedule
from plait.schedules.schedule import Schedule
from plait.schedules.steps import Steps
from plait.sharding.reducer import Reducer
from plait.sharding.unit import Unit, build_unit
from plait.tensor.losses import Loss


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh, loss: Loss, *, seed: int = 0) -> Engine:
    """Weave `model` over the ranks of `mesh` as `plan` says; call it on every rank with the same arguments.

    The model (best an `nn.Sequential`, nested ones are flattened) is read and never altered. Parameters
    with values keep them; those on the meta device get values that depend on their name, `seed` and
    global index only. Communication, once: the ranks agree on model, plan and values (256 bytes each),
    make groups for tied parameters, and map each other's gradients where they share a host. Raises
    PlanError, MeshError, ModelError or ScheduleError before anything runs, and CommunicationError when the
    ranks were given different models or plans.
    """
    refuse_missing_parts(plan)
    mesh.check_plan(plan)
    if not isinstance(loss, Loss):
        raise PlanError(
            f"the loss is {loss!r}: give an object with total(output, targets), a sum, and weight(targets), "
            "what it is divided by, such as plait.cross_entropy."
        )
    sequence = sequence_of(model)
    refuse_layout_dependence(sequence)
    order = schedule(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches)
    counts = cut(sequence, plan, order)
    for statement in (fingerprint(sequence, plan, counts, seed), fingerprint_of_values(sequence)):
        agree(statement, mesh.group("world"), mesh.device)
    users = unit_users(sequence, counts)
    steps = Steps(order, Shape(counts, users), mesh.index("pp"))
    mine = {stage: span(stage, counts) for stage in order.stages_of(mesh.index("pp"))}
    layouts = parameter_layouts(sequence, mesh)
    groups = reduction_groups(users, order.rank_of, mesh)
    units = build_units(sequence, mine.values(), layouts, groups, plan, mesh, seed)
    stages = build_stages(sequence, mine, units, plan, mesh, seed)
    owned = {unit for unit, places in users.items() if owner(places, order.rank_of) == mesh.index("pp")}
    reducer = Reducer(units, groups, owned)
    worker = Worker(stages, Exchange(*mesh.pipeline_groups, mesh.device), LossEnd(loss))
    parts = Parts(
        plan=plan,
        mesh=mesh,
        loss=loss,
        counts=counts,
        layouts=layouts,
        skeleton=private_copy(sequence.layers, on_meta(sequence, DTYPES[plan.precision])),
        steps=steps,
        worker=worker,
        reducer=reducer,
        context=getattr(model, "context", None),
    )
    return Engine(parts)


def refuse_missing_parts(plan: Plan) -> None:
    """PlanError for what a plan can say and the engine cannot do yet."""
    missing = {
        "tp": (plan.tp, 1),
        "strategy": (plan.strategy, "none"),
        "reduce": (plan.reduce, "last"),
        "recompute": (plan.recompute, "none"),
        "chunks": (plan.chunks or 1, 1),
    }
    for name, (value, available) in missing.items():
        if value != available:
            raise PlanError(f"plan.{name} is {value!r}: only {available!r} is available yet.")


def cut(sequence: LayerSequence, plan: Plan, order: Schedule) -> tuple[int, ...]:
    """Layers per stage: the plan's own, or those for which the step is shortest."""
    layers = len(sequence.layers)
    counts = plan.layers_per_stage or shortest_cut(layer_costs(sequence.layers), order)
    if len(counts) != plan.pp or sum(counts) != layers or min(counts) < 1:
        raise PlanError(
            f"plan.layers_per_stage = {list(counts)} does not cut {layers} layers into {plan.pp} stages: "
            f"give {plan.pp} counts of at least 1 with the sum {layers}."
        )
    return tuple(counts)


def fingerprint(sequence: LayerSequence, plan: Plan, counts: Sequence[int], seed: int) -> str:
    """What all ranks must agree on, as one line."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in sequence.layers:
        for name, parameter in layer.module.named_parameters():
            kind = f"{parameter.shape} {parameter.dtype} {parameter.requires_grad}"
            digest.update(f"{layer.path} {type(layer.module).__name__} {name} {kind}".encode())
    digest.update(str(sequence.users).encode())
    return f"parallelize(model {digest.hexdigest()}, seed {seed}, layers per stage {tuple(counts)}, {plan})"


def fingerprint_of_values(sequence: LayerSequence) -> str:
    """The values that the model brings along; ranks that start differently would never come together."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in sequence.layers:
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            if not tensor.is_meta:
                digest.update(bits_of(tensor))
    return f"start from values {digest.hexdigest()} (seed each rank alike before it builds the model)"


def unit_users(sequence: LayerSequence, counts: Sequence[int]) -> dict[str, tuple[Place, ...]]:
    """For each unit, the layers whose backward adds to its gradients."""
    places = [Place(stage, layer) for stage, count in enumerate(counts) for layer in range(count)]
    return {
        sequence.unit_of(name): tuple(places[layer] for layer in layers)
        for name, layers in sequence.users.items()
    }


def span(stage: int, counts: Sequence[int]) -> range:
    """Which layers of the model make up a stage."""
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def parameter_layouts(sequence: LayerSequence, mesh: Mesh) -> dict[str, Layout]:
    """Which piece of each parameter a rank of its stage holds: all of it, as long as nothing is sharded."""
    inside = {axis: size for axis, size in mesh.sizes.items() if axis != "pp"}
    return {name: Layout(parameter.shape, inside) for name, parameter in sequence.parameters.items()}


def build_units(
    sequence: LayerSequence,
    spans: Iterable[range],
    layouts: Mapping[str, Layout],
    groups: Mapping[str, Group],
    plan: Plan,
    mesh: Mesh,
    seed: int,
) -> dict[str, Unit]:
    """The units of this rank's layers, filled with initial values."""
    mine = {layer for layers in spans for layer in layers}
    members: dict[str, dict[str, nn.Parameter]] = {}
    for name, users in sequence.users.items():
        if mine.intersection(users):
            members.setdefault(sequence.unit_of(name), {})[name] = sequence.parameters[name]

    def value_of(name: str) -> Tensor:
        layer = sequence.layers[sequence.users[name][0]]
        whole = initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), seed)
        return shard(whole, layouts[name], mesh.coordinate)

    return {
        unit: build_unit(unit, parameters, value_of, mesh.device, DTYPES[plan.precision], groups[unit])
        for unit, parameters in members.items()
    }


def build_stages(
    sequence: LayerSequence,
    spans: Mapping[int, range],
    units: Mapping[str, Unit],
    plan: Plan,
    mesh: Mesh,
    seed: int,
) -> dict[int, Stage]:
    """This rank's stages: private copies of their layers, on the units' parameters and real buffers."""
    real: dict[int, Tensor] = {}
    for unit in units.values():
        for name, parameter in unit.parameters.items():
            real[id(sequence.parameters[name])] = parameter
    mine = [sequence.layers[layer] for layers in spans.values() for layer in layers]
    for layer in mine:
        for name, buffer in layer.module.named_buffers():
            value = initial_value(layer.module, layer.path, name, seed)
            real[id(buffer)] = convert(value, DTYPES[plan.precision], mesh.device)
    # One copy of all of this rank's layers, so that what they share stays shared.
    copies = iter(private_copy(mine, real))
    keeper = Keeper()
    stages = {
        number: Stage(number, [next(copies) for _ in layers], keeper) for number, layers in spans.items()
    }
    for stage in stages.values():
        for layer in stage.layers:
            defer_weight_gradients(layer.module, keeper)
    return stages


def reduction_groups(
    users: Mapping[str, tuple[Place, ...]], rank_of: Sequence[int], mesh: Mesh
) -> dict[str, Group]:
    """For each unit of this rank, the ranks over which its gradients are summed, once.

    The ranks of `dp`; for a parameter tied across stages, those of each rank of `pp` that holds it.
    """
    groups = {}
    spanning: dict[tuple[int, ...], Group | None] = {}
    for unit, places in users.items():
        holders = tuple(sorted({rank_of[place.stage] for place in places}))
        if len(holders) == 1:
            groups[unit] = mesh.group("dp")
            continue
        if holders not in spanning:
            spanning[holders] = mesh.new_group(ranks_holding(holders, mesh), "tie")
        group = spanning[holders]
        if group is not None:
            groups[unit] = group
    return groups


def owner(places: Sequence[Place], rank_of: Sequence[int]) -> int:
    """The rank of `pp` that a unit counts for: the first that holds it."""
    return min(rank_of[place.stage] for place in places)


def ranks_holding(holders: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """For each coordinate along `tp`, the global ranks at `holders` along `pp`, over all of `dp`."""
    return [
        [mesh.rank_at(pp=pp, dp=dp, tp=tp) for pp in holders for dp in range(mesh.size("dp"))]
        for tp in range(mesh.size("tp"))
    ]
