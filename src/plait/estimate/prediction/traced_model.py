"""`TracedModel`: the work and memory of any model for predictions, from runs of its layers on meta."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from plait.engine.blueprint import assumed_costs, build_blueprint
from plait.errors import ModelError, PlaitError
from plait.estimate.memory.predict_memory import routing_assumption
from plait.estimate.memory.whole_parameter_owners import (
    Moments,
    OwnerNeeds,
    by_stage,
    muon_of,
    owner_needs,
    require_moments,
)
from plait.estimate.prediction.predicted_model import PredictedModel
from plait.estimate.prediction.traced_layers import TracedLayers, TracedSizes
from plait.estimate.prediction.traced_memories import TracedMemories
from plait.estimate.time.layer_work import LayerWork
from plait.estimate.time.operation_times import FusedAttention, Product
from plait.estimate.time.whole_parameter_updates import MatrixCounts, StageOwners
from plait.models.gpt2 import gpt2_of
from plait.models.llama import llama_of
from plait.optimizers.newton_schulz import iteration_cost
from plait.optimizers.optimizer_makers import MuonSettings
from plait.optimizers.predicted_owner_work import found_matrices, matrix_parts_of
from plait.pictures.quantities import count_text
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.schedules.search.stage_cuts import LayerCosts
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.losses import cross_entropy
from plait.tensor.nested_values import Value, tensors_of
from plait.tensor.torch_losses import GivenLoss, as_loss


@dataclass(frozen=True, eq=False)
class TracedModel(PredictedModel):
    """Any model that `parallelize` takes, for predictions: its layers run on the meta device."""

    layers: TracedLayers
    _owners: dict[tuple[object, ...], Sequence[StageOwners]] = field(default_factory=dict)

    @property
    def kinds(self) -> Sequence[LayerKind]:
        """The kind of each layer, first layer first: the same for layers of equal structure and inputs."""
        return self.layers.kinds

    @cached_property
    def layer_costs(self) -> tuple[float, ...]:
        """Multiplications per token of each layer."""
        return assumed_costs(self.layers.blueprint(Plan()).sequence, None).total

    @cached_property
    def context(self) -> int:
        """Tokens of a sequence: the size of dim 1 of integer inputs, else 1."""
        first = next(tensors_of(self.layers.inputs))
        return 1 if first.is_floating_point() or first.dim() < 2 else first.shape[1]

    @cached_property
    def operations_per_token(self) -> float:
        """Floating-point operations per token of matrix products and attention, forward and backward."""
        sizes = self.sizes(Plan(), 1, on_cpu=True)
        each = {kind: _operations(sizes.work(kind)) for kind in {*self.kinds}}
        return sum(each[kind] for kind in self.kinds) / self.context

    @property
    def experts(self) -> int:
        """The most experts of a layer, which plans can divide over `ep` and `etp`; 0 without any."""
        return self.layers.experts

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The sentence that balanced routing is assumed, where layers have experts; else empty."""
        return routing_assumption(self.layers.module)

    def about(self) -> str:
        """Return the number of parameters and layers, and other sizes of the model, as text."""
        count = sum(one.numel() for one in self.layers.module.parameters())
        return f"{count_text(count)} parameters ({len(self.kinds)} layers, context {self.context:,})"

    def costs_for_cut(self, plan: Plan) -> LayerCosts:
        """Return the costs by which `parallelize` divides layers into stages, if none are measured."""
        blueprint = self.layers.blueprint(plan)
        return assumed_costs(blueprint.sequence, blueprint.output_linear).with_messages(plan.pp)

    def check(self, plan: Plan) -> None:
        """Raise PlanError or ModelError where the model cannot be divided as the plan says."""
        build_blueprint(self.layers.module, plan, self.layers.rules, known=self.layers.parts)

    def undivided(self, plan: Plan) -> str | None:
        """Return in words why the model cannot be divided over the plan's tp, cp, ep and etp, or None.

        Raises PlanError or ModelError for what is wrong without a division, too.
        """
        if plan.cp > 1 and not plan.divides_experts:
            without_cp = self.undivided(replace(plan, cp=1))
            if without_cp is not None:
                return without_cp
        try:
            blueprint = self.layers.blueprint(plan)
            if plan.cp > 1:  # whether layers can exchange positions is known when they run
                self.layers.traces(plan, 1, on_cpu=False)
        except PlaitError as refused:
            if plan.tp == plan.cp == 1 and not plan.divides_experts:
                raise
            return f"the model allows no {_degrees(plan)}: {str(refused).removesuffix('.')}"
        return None if plan.tp == 1 or blueprint.module_rules else "no rule divides the model over tp"

    def sizes(self, plan: Plan, rows: float, *, on_cpu: bool) -> TracedSizes:
        """Return sizes and operations of a micro-batch of `rows` rows; `on_cpu`: layers run on CPUs."""
        return TracedSizes(self.layers, plan, rows, on_cpu, self.layers.mean_moments)

    def owners(self, plan: Plan, cut: Sequence[int]) -> Sequence[StageOwners]:
        """Return by stage the work of ranks that update whole parameters, as for Muon; empty without any.

        `cut`: how many layers each stage has.
        """
        moments = self.layers.moments
        if isinstance(moments, int):
            return ()
        degrees = plan.pp, plan.dp, plan.replicate, plan.cp, plan.tp, plan.ep, plan.etp
        kind = self.sizes(plan, 1, on_cpu=True).kind
        key = degrees, kind, plan.schedule, plan.chunks, tuple(cut)
        if key not in self._owners:
            made = replace(plan, layers_per_stage=tuple(cut))
            blueprint = build_blueprint(self.layers.module, made, self.layers.rules, known=self.layers.parts)
            stages = by_stage(blueprint, owner_needs(blueprint, moments))
            self._owners[key] = [_owners_of(ranks, muon_of(moments)) for ranks in stages]
        return self._owners[key]

    def mean_owner(self, plan: Plan) -> StageOwners | None:
        """Return a lower bound of Muon's mean work over all ranks, for any cut into stages, or None.

        All ranks together iterate for each matrix once, and of c copies of a matrix c − 1 at least are sent
        back. One rank iterates for the largest matrix.
        """
        muon = muon_of(self.layers.moments)
        if muon is None:
            return None
        shapes, elements, largest = self._all_matrices
        sizes = self.sizes(plan, 1, on_cpu=True)
        copies = plan.world / plan.pp / plan.tp / sizes.state_ranks
        sent = muon.sent_dtype(sizes.kind.master).itemsize * elements * max(copies - 1, 0.0)
        counts = {shape: count / plan.world for shape, count in shapes.items()}
        exchanged = 0.0, sent / plan.world
        return StageOwners([counts, largest], exchanged, iterations=muon.iterations, dtype=muon.dtype)

    @cached_property
    def _all_matrices(self) -> tuple[MatrixCounts, int, MatrixCounts]:
        """How many matrices of each shape Muon has, elements of those not of experts, the most expensive."""
        muon, blueprint = muon_of(self.layers.moments), self.layers.blueprint(Plan())
        assert muon is not None
        modules = (layer.module for layer in blueprint.sequence.layers)
        of_experts = {
            id(one) for layer in modules for _, part in experts_in(layer) for one in part.parameters()
        }
        shapes, elements = Counter[tuple[int, int]](), 0
        for name, part in matrix_parts_of(found_matrices(blueprint, muon)):
            shapes.update(part.shapes)
            if id(blueprint.sequence.parameters[name]) not in of_experts:
                elements += part.box.numel
        largest = max(shapes, key=lambda shape: iteration_cost(*shape), default=None)
        return shapes, elements, {} if largest is None else {largest: 1}

    def memories(self) -> TracedMemories:
        """Return a `TracedMemories`, which predicts this model's memory under any plan."""
        return TracedMemories(self.layers)


def traced_model(
    model: object,
    inputs: Value = None,
    targets: Value | None = None,
    loss: GivenLoss = cross_entropy,
    rules: Rules | None = None,
    moments: Moments = 2,
) -> TracedModel:
    """Return a module, or a model of a `Decoder`'s sizes, as a `PredictedModel` whose layers run on meta.

    Raises ModelError for anything else, and for a model without a `context` where `inputs` are not given.
    """
    if isinstance(model, Decoder):
        model = gpt2_of(model) if model.family == "gpt2" else llama_of(model)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is a {type(model).__name__}: give an nn.Module, or the sizes of a gpt2 or llama as "
            "plait.plan.decoder_sizes.Decoder(...)."
        )
    require_moments(moments)
    if inputs is None:
        context = getattr(model, "context", None)
        if context is None:
            raise ModelError(
                f"the rows of {type(model).__name__} are not known: give inputs, of any number of rows, on "
                "the meta device too."
            )
        inputs = torch.empty(1, context, dtype=torch.int64, device="meta")
    return TracedModel(TracedLayers(model, inputs, targets, as_loss(loss), rules, moments))


def _owners_of(ranks: Sequence[OwnerNeeds], muon: MuonSettings | None) -> StageOwners:
    """Return the work of owners on the ranks of a stage; `muon`: None for an optimizer within `Owned`."""
    there, back = zip(*(one.exchanged for one in ranks), strict=True)
    found = StageOwners(
        [one.shapes for one in ranks], (max(there), max(back)), max(one.updated for one in ranks)
    )
    return found if muon is None else found._replace(iterations=muon.iterations, dtype=muon.dtype)


def _degrees(plan: Plan) -> str:
    """Return the degrees over which layers are divided, in words."""
    experts = f", ep = {plan.ep} and etp = {plan.etp}" if plan.divides_experts else ""
    return f"tp = {plan.tp} with cp = {plan.cp}{experts}"


def _operations(work: LayerWork) -> float:
    """Return the floating-point operations of a layer's products and attention, with masked positions."""
    found = 0.0
    for one in (*work.forward, *work.backward, *work.weights):
        if isinstance(one, Product):
            found += 2 * one.batch * one.m * one.n * one.k
        elif isinstance(one, FusedAttention):
            pairs = one.rows * one.heads * one.queries * one.keys
            found += (8 if one.backward else 4) * pairs * one.width
    return found
