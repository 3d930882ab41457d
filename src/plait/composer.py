"""`parallelize`: the only place where the parts meet.

model ─ sequence of layers ─ cut into stages ┐
plan  ─ schedule ─ checked ─ lowered ────────┼→ Engine
mesh  ─ groups ──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
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
from plait.pipeline.fingerprint import fingerprint, fingerprint_of_values
from plait.pipeline.loss_end import LossEnd
from plait.pipeline.precision import DTYPES, convert
from plait.pipeline.refusals import refuse_layout_dependence
from plait.pipeline.sequence import LayerSequence, private_copy, sequence_of
from plait.pipeline.stage import Stage
from plait.pipeline.worker import Worker
from plait.plan import Plan
from plait.planner.cut import shortest_cut
from plait.rules import Rule, Rules
from plait.schedules.lower import Place, Shape
from plait.schedules.policies import order_by
from plait.schedules.schedule import Schedule
from plait.schedules.steps import Steps
from plait.search.schedule import require_known
from plait.sharding.holding import Holders, counted_parameters, reduction_groups
from plait.sharding.reducer import Reducer
from plait.sharding.unit import Unit, build_unit
from plait.tensor.losses import Loss, loss_of_pieces
from plait.tensor.vocabulary import Vocabulary
from plait.tensor.weave import layouts_of, rules_of_modules
from plait.weaving import Weaving, build_skeleton, named, prover

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""Those with one stage a rank."""


def parallelize(
    model: nn.Module, plan: Plan, mesh: Mesh, loss: Loss, *, rules: Rules | None = None, seed: int = 0
) -> Engine:
    """Weave `model` over the ranks of `mesh` as `plan` says; call it on every rank with the same arguments.

    The model (best an `nn.Sequential`, nested ones are flattened) is read and never altered. Parameters
    with values keep them; those on the meta device get values that depend on their name, `seed` and
    global index only. `rules` say which modules are cut over `tp`, by default the model's own, `model.rules`.
    Communication, once: the ranks agree on model, plan and values (256 bytes each), make groups for tied
    parameters and repeated heads, and map each other's gradients where they share a host. Raises
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
    cuts = matched_rules(model, rules, plan, sequence)
    layouts = parameter_layouts(sequence, cuts, mesh)
    order = order_by(plan.schedule, plan.pp, plan.microbatches)
    counts = cut(sequence, plan, order)
    for statement in (fingerprint(sequence, plan, counts, cuts, seed), fingerprint_of_values(sequence)):
        agree(statement, mesh.group("world"), mesh.device)
    users = unit_users(sequence, counts)
    steps = Steps(order, Shape(counts, users, plan.overlap), mesh.index("pp"))
    mine = {stage: span(stage, counts) for stage in order.stages_of(mesh.index("pp"))}
    holders = parameter_holders(sequence, users, order.rank_of)
    groups = reduction_groups(holders, layouts, mesh)
    units = build_units(sequence, mine.values(), layouts, groups, plan, mesh, seed)
    weaving = Weaving(cuts, mesh.group("tp"))
    stages = build_stages(sequence, mine, units, weaving, plan, mesh, seed)
    skeletons = (build_skeleton(sequence, layouts, weaving, plan, mesh) for _ in range(2))
    vocabulary = weaving.vocabulary_of(sequence.layers[-1])
    ending = loss_end(loss, vocabulary)
    worker = Worker(stages, Exchange(*mesh.pipeline_groups, mesh.device), ending)
    parts = Parts(
        plan=plan,
        mesh=mesh,
        loss=loss,
        counts=counts,
        layouts=layouts,
        skeleton=next(skeletons),
        prove=prover(sequence, layouts, next(skeletons), ends_inside=vocabulary is not None),
        steps=steps,
        worker=worker,
        reducer=Reducer(units),
        counted=counted_parameters(holders, layouts, mesh),
        vocabulary=vocabulary,
        context=getattr(model, "context", None),
    )
    return Engine(parts)


def loss_end(loss: Loss, vocabulary: Vocabulary | None) -> LossEnd:
    """The end of the last stage, for whole logits or for this rank's piece of them."""
    if vocabulary is None:
        return LossEnd(loss)
    return LossEnd(loss_of_pieces(loss, vocabulary), spends=True)


def refuse_missing_parts(plan: Plan) -> None:
    """PlanError for what a plan can say and the engine cannot do yet."""
    require_known(plan.schedule)
    available = {
        "schedule": SCHEDULES,
        "strategy": ("none",),
        "reduce": ("last",),
        "recompute": ("none",),
        "chunks": (None, 1),
    }
    for name, values in available.items():
        value = getattr(plan, name)
        if value not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            raise PlanError(f"plan.{name} is {value!r}: only {known} is available yet.")


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


def matched_rules(
    model: nn.Module, rules: Rules | None, plan: Plan, sequence: LayerSequence
) -> dict[str, Rule]:
    """The rule of each module that is cut. PlanError where `tp` asks for rules and there are none."""
    if plan.tp == 1:
        if rules is not None:
            rules_of_modules(rules, named(sequence.layers))  # to hear of mistakes before there are ranks
        return {}
    chosen = getattr(model, "rules", None) if rules is None else rules
    if chosen is None:
        raise PlanError(
            f"plan.tp is {plan.tp}, but nothing says which modules of the model are cut: give "
            "parallelize rules, such as plait.models.gpt2.RULES, or set plan.tp to 1."
        )
    return rules_of_modules(chosen, named(sequence.layers))


def parameter_layouts(sequence: LayerSequence, cuts: Mapping[str, Rule], mesh: Mesh) -> dict[str, Layout]:
    """Which piece of each parameter a rank of its stage holds."""
    inside = {axis: size for axis, size in mesh.sizes.items() if axis != "pp"}
    layouts = layouts_of(named(sequence.layers), cuts, inside)
    return {name: layouts[id(parameter)] for name, parameter in sequence.parameters.items()}


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
    members: dict[str, list[str]] = {}
    for name, users in sequence.users.items():
        if mine.intersection(users):
            members.setdefault(sequence.unit_of(name), []).append(name)

    def template(name: str) -> nn.Parameter:
        whole, shape = sequence.parameters[name], layouts[name].local_shape(mesh.coordinate)
        return nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)

    def value_of(name: str) -> Tensor:
        layer = sequence.layers[sequence.users[name][0]]
        whole = initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), seed)
        return shard(whole, layouts[name], mesh.coordinate)

    dtype = DTYPES[plan.precision]
    return {
        unit: build_unit(unit, {name: template(name) for name in names}, value_of, mesh.device, dtype, groups)
        for unit, names in members.items()
    }


def build_stages(
    sequence: LayerSequence,
    spans: Mapping[int, range],
    units: Mapping[str, Unit],
    weaving: Weaving,
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
    keeper = Keeper()
    # One copy of all of this rank's layers, so that what they share stays shared.
    copies = iter(weaving.weave(private_copy(mine, real), keeper))
    stages = {
        number: Stage(number, [next(copies) for _ in layers], keeper) for number, layers in spans.items()
    }
    for stage in stages.values():
        for layer in stage.layers:
            defer_weight_gradients(layer.module, keeper)
    return stages


def parameter_holders(
    sequence: LayerSequence, users: Mapping[str, tuple[Place, ...]], rank_of: Sequence[int]
) -> Holders:
    """The ranks of `pp` that hold each parameter."""
    return {
        name: tuple(sorted({rank_of[place.stage] for place in users[sequence.unit_of(name)]}))
        for name in sequence.parameters
    }
