"""`parallelize`: the only place where the parts meet.

model ┐
      ├ blueprint ─ programs, units, stages ┐
plan  ┘                                     ├→ Engine
mesh  ─ groups ─────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from plait.autograd.deferred import Keeper, defer_weight_gradients
from plait.blueprint import Blueprint, draw, span
from plait.comm.agreement import agree
from plait.comm.mesh import Mesh
from plait.engine import Engine, Parts
from plait.errors import PlanError
from plait.layout import shard
from plait.models.initial import initial_value
from plait.pipeline.exchange import Exchange
from plait.pipeline.fingerprint import fingerprint, fingerprint_of_values
from plait.pipeline.loss_end import LossEnd
from plait.pipeline.precision import DTYPES, convert
from plait.pipeline.sequence import LayerSequence, private_copy
from plait.pipeline.stage import Stage
from plait.pipeline.worker import Worker
from plait.plan import Plan
from plait.rules import Rules
from plait.schedules.shape import sharding_of
from plait.schedules.steps import Steps
from plait.sharding.gatherer import Gatherer
from plait.sharding.holding import counted_parameters, reduction_groups
from plait.sharding.reducer import Reducer
from plait.sharding.unit import Maker, Unit
from plait.tensor.losses import Loss, loss_of_pieces
from plait.tensor.vocabulary import Vocabulary
from plait.weaving import Weaving, build_skeleton, prover


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
    mesh.check_plan(plan)
    if not isinstance(loss, Loss):
        raise PlanError(
            f"the loss is {loss!r}: give an object with total(output, targets), a sum, and weight(targets), "
            "what it is divided by, such as plait.cross_entropy."
        )
    drawn = draw(model, plan, rules)
    sequence = drawn.sequence
    statement = fingerprint(sequence, plan, drawn.counts, drawn.cuts, seed)
    for told in (statement, fingerprint_of_values(sequence)):
        agree(told, mesh.group("world"), mesh.device)
    steps = Steps(drawn.order, drawn.shape, mesh.index("pp"))
    spans = {stage: span(stage, drawn.counts) for stage in drawn.order.stages_of(mesh.index("pp"))}
    units = build_units(drawn, spans.values(), mesh, seed)
    weaving = Weaving(drawn.cuts, mesh.group("tp"))
    stages = build_stages(sequence, spans, units, weaving, plan, mesh, seed)
    skeletons = (build_skeleton(sequence, drawn.whole_layouts, weaving, plan, mesh) for _ in range(2))
    vocabulary = weaving.vocabulary_of(sequence.layers[-1])
    worker = Worker(stages, Exchange(*mesh.pipeline_groups, mesh.device), loss_end(loss, vocabulary))
    parts = Parts(
        plan=plan,
        mesh=mesh,
        loss=loss,
        counts=drawn.counts,
        layouts=drawn.layouts,
        whole_layouts=drawn.whole_layouts,
        skeleton=next(skeletons),
        prove=prover(sequence, drawn.whole_layouts, next(skeletons), ends_inside=vocabulary is not None),
        steps=steps,
        worker=worker,
        gatherer=Gatherer(units),
        reducer=Reducer(units),
        counted=counted_parameters(drawn.holders, drawn.layouts, mesh),
        vocabulary=vocabulary,
        context=getattr(model, "context", None),
    )
    return Engine(parts)


def loss_end(loss: Loss, vocabulary: Vocabulary | None) -> LossEnd:
    """The end of the last stage, for whole logits or for this rank's piece of them."""
    if vocabulary is None:
        return LossEnd(loss)
    return LossEnd(loss_of_pieces(loss, vocabulary), spends=True)


def build_units(drawn: Blueprint, spans: Iterable[range], mesh: Mesh, seed: int) -> dict[str, Unit]:
    """The units of this rank's layers, filled with initial values."""
    sequence, plan = drawn.sequence, drawn.plan

    def value_of(name: str) -> Tensor:
        layer = sequence.layers[sequence.users[name][0]]
        whole = initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), seed)
        return shard(whole, drawn.whole_layouts[name], mesh.coordinate)

    maker = Maker(
        policy=drawn.policy_on(mesh.device),
        layouts=drawn.layouts,
        coordinate=mesh.coordinate,
        shard=mesh.group("shard"),
        rest=reduction_groups(drawn.holders, drawn.layouts, mesh, "replicate" if plan.shards else "dp"),
        value_of=value_of,
    )
    mine = {layer for layers in spans for layer in layers}
    used = [name for name, users in sequence.users.items() if mine.intersection(users)]
    names = dict.fromkeys(sequence.unit_of(name) for name in used)
    return {name: maker.make(name, drawn.arrangement[name]) for name in names}


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
    keeper, adds_late = Keeper(), sharding_of(plan).scatters == "each"
    # One copy of all of this rank's layers, so that what they share stays shared.
    copies = iter(weaving.weave(private_copy(mine, real), keeper))
    stages = {
        number: Stage(number, [next(copies) for _ in layers], keeper, adds_late=adds_late)
        for number, layers in spans.items()
    }
    for stage in stages.values():
        for layer in stage.layers:
            defer_weight_gradients(layer.module, keeper)
    return stages
