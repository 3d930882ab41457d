"""The blueprint of a run: everything that follows from a model and a plan alone, without ranks or tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

from torch import nn

from plait.engine.fingerprint import structure_of
from plait.engine.sharding.unit import Owners
from plait.errors import PlanError, ScheduleError
from plait.models.choose_float8_linears import NO_LINEARS, LinearChoice, choose_linears, require_multipliable
from plait.models.layers.layer_sequence import (
    LayerSequence,
    aliases_of,
    layer_costs,
    saved_buffers,
    sequence_of,
    without_values,
)
from plait.models.layers.model_validation import refuse_compiled_modules, refuse_layout_dependence
from plait.models.lora import refuse_adapted_output
from plait.plan.axes import coordinate_of, groups_along, layout_degrees, sizes_of_plan
from plait.plan.flat_buffer_specs import BufferSpecs, build_buffer_specs, shard_layouts
from plait.plan.layout.layout import Layout
from plait.plan.parameter_units import FLOAT16, BufferKind, ModelParameter, UnitSpec, resolve_units
from plait.plan.plan import Plan, Recompute
from plait.plan.rules import Rule, Rules, join
from plait.plan.shard_plan import ShardPlan
from plait.proof.layer_runs_on_meta import MetaLayers
from plait.ranks.group import Group, alone
from plait.schedules.check import check
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import Ending, lower
from plait.schedules.lowering.program import NO_EXCHANGES, ExpertExchanges, LayerIndex, LoweringSpec, Program
from plait.schedules.named_schedules import forward_only
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import LayerCosts, StageCut, schedule_and_cut
from plait.tensor.chunked_cross_entropy import output_linear_name
from plait.tensor.dtypes import DTYPES, named_dtype
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.experts.experts import ExpertRanks
from plait.tensor.float8.recipes import RECIPES
from plait.tensor.parallel.apply_float8 import Float8Layers
from plait.tensor.parallel.apply_rules import layouts_of, match_modules
from plait.tensor.parallel.tensor_parallelism import (
    SequenceDims,
    TensorParallelism,
    named,
    sequence_dims,
    summed_over_tp,
)

T = TypeVar("T")


@dataclass(frozen=True)
class StepPrograms:
    """The programs (instructions) of all ranks of `pp` for training, evaluation and generation."""

    schedule: Schedule
    spec: LoweringSpec

    @cached_property
    def train(self) -> Sequence[Program]:
        """The programs that train on every micro-batch. Raises ScheduleError for an illegal schedule."""
        check(self.schedule)
        return self._lower(self.schedule, "loss")

    @cached_property
    def evaluate(self) -> Sequence[Program]:
        """The programs that compute the loss of every micro-batch, without a backward."""
        return self._lower_forward(self.schedule.microbatches, "loss")

    @cached_property
    def output(self) -> Sequence[Program]:
        """The programs that compute the model's output for every micro-batch."""
        return self._lower_forward(self.schedule.microbatches, "output")

    @cached_property
    def output_of_one(self) -> Sequence[Program]:
        """The programs that compute the model's output for a batch of one micro-batch."""
        return self._lower_forward(1, "output")

    def posting_late(self) -> StepPrograms:
        """Return programs for NCCL: each receive is posted only one action before the action that uses it.

        They are posted as early as on a CPU where that would deadlock, as for some searched orders: a rank
        waits for a send before it sends more than `SENDS_IN_FLIGHT` others.
        """
        return replace(self, spec=replace(self.spec, posts_late=True))

    def _lower_forward(self, microbatches: int, ending: Ending) -> Sequence[Program]:
        made = forward_only(self.schedule.rank_of, ranks=self.schedule.ranks, microbatches=microbatches)
        return self._lower(made, ending)

    def _lower(self, schedule: Schedule, ending: Ending) -> Sequence[Program]:
        if self.spec.posts_late:
            with suppress(ScheduleError):
                late = lower(schedule, self.spec, ending)
                check_programs(late, self.spec.exchanges, rendezvous=False)
                return late
        programs = lower(schedule, replace(self.spec, posts_late=False), ending)
        check_programs(programs, self.spec.exchanges)
        return programs


class KnownParts:
    """Cache of what blueprints of one model under many plans have in common; the model must not change."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, Any] = {}

    def part(self, make: Callable[..., T], *arguments: Any, key: Hashable = ()) -> T:
        """Return `make(*arguments)`, cached by `make` and `key`; the arguments are not compared."""
        known = make, key
        if known not in self._parts:
            self._parts[known] = make(*arguments)
        found: T = self._parts[known]
        return found


@dataclass(frozen=True)
class Blueprint:
    """Stages, layouts, flat buffers and schedule of a whole model under a plan; the same on every rank."""

    plan: Plan
    sequence: LayerSequence
    rules: Rules
    """The rules given to `parallelize`, or the model's own; empty without any."""
    module_rules: Mapping[str, Rule]
    """The rule of each module that is partitioned over `tp`."""
    whole_layouts: Mapping[str, Layout]
    """The layout of each parameter as layers use it: sharded over `tp` only."""
    sequence_dims: tuple[SequenceDims, ...]
    """The sequence dims of each layer."""
    units: Mapping[str, UnitSpec]
    """How each unit of parameters is stored, gathered and reduced, by its name."""
    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    """How much of its forward each layer runs again in its backward."""
    output_linear: str | None
    """The name, within the last layer, of the linear whose logits the loss computes in chunks; None: none."""
    float8: LinearChoice
    """The linears that multiply in float8, and why the others do not; both empty without `plan.linears`."""
    known: KnownParts = field(default_factory=KnownParts, compare=False, repr=False)
    """What it has in common with blueprints of the same model under other plans."""

    @cached_property
    def buffer_specs(self) -> BufferSpecs:
        """Sizes, dtypes and offsets of the flat buffers of each unit (parameters gathered together)."""
        return build_buffer_specs(self.units, self.whole_layouts)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each parameter's shards, as the ranks' optimizers update them."""
        return shard_layouts(self.buffer_specs, self.whole_layouts)

    @cached_property
    def stage_layers(self) -> tuple[range, ...]:
        """The range of layer numbers that each stage runs, counted over the model."""
        bounds = accumulate(self.layers_per_stage, initial=0)
        return tuple(range(first, stop) for first, stop in pairwise(bounds))

    def layers_of(self, rank: int) -> dict[int, range]:
        """Return by stage the numbers of the layers that a rank of `pp` runs."""
        return {stage: self.stage_layers[stage] for stage in self.schedule.stages_of(rank)}

    @cached_property
    def lowering_spec(self) -> LoweringSpec:
        """What lowering the schedule to instructions needs: layers per stage, units per layer, overlap."""
        counts = enumerate(self.layers_per_stage)
        places = [LayerIndex(stage, layer) for stage, count in counts for layer in range(count)]
        return LoweringSpec(
            self.layers_per_stage,
            {name: tuple(places[layer] for layer in unit.users) for name, unit in self.units.items()},
            self.plan.overlap,
            {name: unit.timing for name, unit in self.units.items()},
            replicated=self.plan.world > self.plan.pp,
            loss_computes_logits=self.output_linear is not None,
            exchanges=self._exchanges(places) if self.plan.divides_experts else NO_EXCHANGES,
        )

    def _exchanges(self, places: Sequence[LayerIndex]) -> ExpertExchanges:
        """Return the layers, at their `places`, and the ranks that exchange tokens for experts."""
        sizes = sizes_of_plan(self.plan)
        return ExpertExchanges(
            {
                place
                for place, layer in zip(places, self.sequence.layers, strict=True)
                if any(experts_in(layer.module))
            },
            {
                tuple(coordinate_of(rank, sizes)["pp"] for rank in ranks)
                for ranks in groups_along(("ep", "etp"), sizes)
            },
        )

    @cached_property
    def programs(self) -> StepPrograms:
        """The instructions of each rank of `pp`, lowered from `schedule`, for training and inference."""
        return StepPrograms(self.schedule, self.lowering_spec)

    @cached_property
    def output_classes(self) -> int | None:
        """The size of the last linear's output, if the loss computes the logits itself, else None."""
        if self.output_linear is None:
            return None
        return cast(nn.Linear, self.sequence.layers[-1].module.get_submodule(self.output_linear)).out_features

    @cached_property
    def structures(self) -> tuple[Hashable, ...]:
        """A key per layer, equal for layers whose runs on the meta device give the same results."""
        return self.known.part(structures_of, self.sequence)

    @cached_property
    def owners(self) -> Owners:
        """The ranks of `pp` that hold each parameter, since they run a layer that uses it."""
        rank_of = self.schedule.rank_of
        ranks = {
            unit: tuple(sorted({rank_of[place.stage] for place in places}))
            for unit, places in self.lowering_spec.units.items()
        }
        return {name: ranks[self.sequence.unit_of(name)] for name in self.sequence.parameters}

    @cached_property
    def kinds(self) -> Mapping[str, BufferKind]:
        """How each parameter is stored, gathered and reduced."""
        return {name: kind for unit in self.units.values() for name, kind in unit.kinds.items()}

    @cached_property
    def float8_weights(self) -> frozenset[str]:
        """The names of the weights that are cast to float8 with one scale for the whole matrix."""
        return weights_cast_once(self.float8, self.plan)

    @cached_property
    def norm_axis(self) -> str:
        """The ranks that sum the gradient norm: "world" for all, "model" for those of one model replica."""
        sharded = any(kind.trains and kind.sharded for kind in self.kinds.values())
        return "world" if sharded or self.plan.divides_experts else "model"

    @cached_property
    def shard_plan(self) -> ShardPlan:
        """The distribution of parameters and buffers over ranks, as checkpoints need it."""
        layers, rank_of = self.sequence.layers, self.schedule.rank_of
        names = (name for specs in self.buffer_specs.values() for spec in specs for name in spec.names)
        buffers = {
            name: (rank_of[stage], tuple(buffer.shape))
            for stage, numbers in enumerate(self.stage_layers)
            for name, buffer in saved_buffers(layers[number] for number in numbers)
        }
        return ShardPlan(
            plan=self.plan,
            layouts={name: self.layouts[name] for name in names},
            buffer_shapes={name: shape for name, (_, shape) in buffers.items()},
            aliases=aliases_of(layers),
            owners={**self.owners, **{name: (rank,) for name, (rank, _) in buffers.items()}},
        )

    def stages_with(self, unit: str, stages: Iterable[int]) -> tuple[int, ...]:
        """Return which of `stages` have layers that use the parameters of `unit`, in model order."""
        users = {place.stage for place in self.lowering_spec.units[unit]}
        return tuple(sorted(users.intersection(stages)))

    @property
    def trains_in_fp16(self) -> bool:
        """Whether gradients may overflow: a trainable parameter is computed or reduced in fp16."""
        kinds = (kind for kind in self.kinds.values() if kind.trains)
        return any(FLOAT16 in (kind.compute, kind.gradient, kind.reduce) for kind in kinds)

    def tensor_parallel(self, group: Group, experts: Group | None = None) -> TensorParallelism:
        """Return the tensor-parallel rules, ready to be applied to the layers of a rank of `group`.

        `experts`: the rank's group along `ep` and `etp`; None where experts are not divided.
        """
        paths = (layer.path for layer in self.sequence.layers)
        sequence_dims = dict(zip(paths, self.sequence_dims, strict=True))
        ranks = None
        if experts is not None or group.size > 1:
            ranks = ExpertRanks(experts or alone("ep"), self.plan.etp, group)
        return TensorParallelism(
            self.module_rules, sequence_dims, self.plan.sequence_parallel == "regather", group, ranks
        )

    def float8_layers(self, tp: Group, cp: Group, etp: Group) -> Float8Layers | None:
        """Return the object that makes this rank's linears multiply in float8; None without `plan.linears`.

        `tp`, `cp`, `etp`: the rank's groups along these axes.
        """
        if self.plan.linears is None:
            return None
        names = frozenset((*self.float8.chosen, *self.float8.experts))
        recipe, compute = RECIPES[self.plan.linears], DTYPES[self.plan.precision]
        return Float8Layers(
            recipe,
            names,
            tp,
            cp,
            etp,
            compute,
            compiled=bool(self.plan.compile),
            keeps_experts=self.keeps_experts_in_float8,
        )

    @property
    def keeps_experts_in_float8(self) -> bool:
        """Whether experts' matrices are cast to float8 once a step, for several micro-batches.

        Not where their memory is freed after each use: their casts would take half of it.
        """
        names = (join(path, "gate_up_proj") for path in self.float8.experts)
        kept = any(self.kinds[name].keeps_parameters for name in names if name in self.kinds)
        return kept and self.plan.microbatches > 1

    def recomputing(self, recompute: Recompute | tuple[Recompute, ...]) -> Blueprint:
        """Return this blueprint with another `Plan.recompute`, on which nothing else in it depends."""
        plan = replace(self.plan, recompute=recompute)
        return replace(self, plan=plan, recompute=recompute_per_layer(plan, len(self.sequence.layers)))

    def meta_layers(
        self, rules: TensorParallelism, coordinate: Mapping[str, int], results: dict[Hashable, Any]
    ) -> MetaLayers:
        """Return the layers on the meta device, with the parameter shards of the rank at `coordinate`."""
        return MetaLayers(
            self.sequence,
            self.structures,
            self.whole_layouts,
            self.kinds,
            rules,
            coordinate=coordinate,
            dtype=DTYPES[self.plan.precision],
            results=results,
            output_linear=self.output_linear,
            gathered_in_float8=self.gathered_in_float8,
        )

    @property
    def gathered_in_float8(self) -> list[tuple[str, ...]]:
        """For each layer, the names of the linears whose partitioned input can be gathered in float8.

        A recipe with another cast of the input for weight gradients would send both, which takes as many
        bytes as 16 bits do, unless what weight gradients need is gathered again for them in any case.
        """
        recipe = None if self.plan.linears is None else RECIPES[self.plan.linears]
        keeps = self.plan.sequence_parallel == "keep"
        if recipe is None or (keeps and not recipe.casts_input_once):
            return []
        return [self.float8.within(layer.path) for layer in self.sequence.layers]


def shared_blueprint(
    model: nn.Module, plan: Plan, rules: Rules | None, results: dict[Hashable, Any]
) -> Blueprint:
    """Return the blueprint of `model`, without tensor values; ranks that are threads of one process share it.

    The engine must not keep the values alive. The latest blueprint stays in `results`, which these ranks
    share: the first one builds it for all that call with an equal model.
    """
    sequence = sequence_of(model)
    chosen = chosen_rules(model, rules)
    paths = tuple(layer.path for layer in sequence.layers)
    whole = structure_of(*(layer.module for layer in sequence.layers))
    key = plan, paths, whole, tuple(chosen.items()) if isinstance(chosen, Mapping) else chosen
    known, blueprint = results.get(Blueprint, (None, None))
    if known != key:
        built = build_blueprint(model, plan, rules)
        blueprint = replace(built, sequence=without_values(sequence), known=KnownParts())
        results[Blueprint] = key, blueprint
    return cast(Blueprint, blueprint)


def build_blueprint(
    model: nn.Module,
    plan: Plan,
    rules: Rules | None = None,
    order_of: Callable[..., tuple[Schedule, StageCut]] = schedule_and_cut,
    known: KnownParts | None = None,
) -> Blueprint:
    """Return the blueprint of `model` under `plan`. Raises PlanError, ModelError or ScheduleError.

    `order_of` is `schedule_and_cut`, or a cached version of it for many plans. `known`: what blueprints of
    this model and these rules under other plans have computed, to which this one adds.
    """
    known = KnownParts() if known is None else known
    sequence = known.part(sequence_of, model)
    if plan.pp > 1 and len(sequence.layers) == 1 and sequence.layers[0].module is model:
        raise PlanError(
            f"plan.pp is {plan.pp}, but the model is a {type(model).__name__}, one layer for plait: give "
            f"{_as_layers(model) or 'an nn.Sequential of its parts, which run one after the other'}."
        )
    known.part(refuse_compiled_modules, model)
    recompute = recompute_per_layer(plan, len(sequence.layers))
    known.part(refuse_layout_dependence, sequence)
    cut = plan.tp > 1, plan.cuts_sequence
    module_rules = known.part(rules_of_partitioned_modules, model, rules, plan, sequence, key=cut)
    sizes = tuple(size for axis, size in sizes_of_plan(plan).items() if axis != "pp")
    whole_layouts, summed = known.part(parameter_layouts, sequence, module_rules, plan, key=(cut, sizes))
    dims = known.part(sequence_dims, named(sequence.layers), module_rules, key=cut)
    chosen, of_linears = chosen_rules(model, rules), (plan.linears, plan.precision, cut, sizes)
    float8 = known.part(float8_linears, sequence, chosen, plan, whole_layouts, key=of_linears)
    units = units_of(sequence, summed, plan, weights_cast_once(float8, plan), known)
    output_linear = None
    if plan.loss_rows is not None:
        last, in_parts = sequence.layers[-1], dims[-1].output is not None
        refuse_adapted_output(last, plan.loss_rows)
        output_linear = output_linear_name(last, module_rules, plan.loss_rows, ends_in_parts=in_parts)
    schedule, counts = order_of(
        plan.schedule,
        known.part(assumed_costs, sequence, output_linear, key=output_linear).with_messages(plan.pp),
        ranks=plan.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        limit=plan.memory_limit,
        cut=plan.layers_per_stage,
    )
    return Blueprint(
        plan,
        sequence,
        chosen or {},
        module_rules,
        whole_layouts,
        dims,
        units,
        schedule,
        counts,
        recompute,
        output_linear,
        float8,
        known,
    )


def structures_of(sequence: LayerSequence) -> tuple[Hashable, ...]:
    """Return a key per layer, equal for layers whose runs on the meta device give the same results."""
    first: dict[Hashable, Hashable] = {}
    structures = (structure_of(layer.module) for layer in sequence.layers)
    return tuple(first.setdefault(one, one) for one in structures)


def float8_linears(
    sequence: LayerSequence, rules: Rules | None, plan: Plan, layouts: Mapping[str, Layout]
) -> LinearChoice:
    """Return which linears multiply in float8, and why others do not. Raises PlanError if the plan cannot.

    It cannot for shapes that float8 products do not take, for mxfp8, and for a model in fp16.
    """
    if plan.linears is None:
        return NO_LINEARS
    if plan.linears == "mxfp8":
        raise PlanError(
            "plan.linears is 'mxfp8', which plait does not implement: "
            "choose float8, float8-rowwise or float8-rowwise-gw."
        )
    if plan.precision is None and any(
        named_dtype(one.dtype) == FLOAT16 for one in sequence.parameters.values()
    ):
        raise PlanError(
            f"plan.linears is {plan.linears!r}, and the model is in fp16, whose loss scale makes gradients "
            "so large that float8 overflows too: set plan.precision to 'bf16' or 'fp32'."
        )
    layers = named(sequence.layers)
    choice = choose_linears(sequence.layers, {} if rules is None else match_modules(rules, layers))
    require_multipliable(choice, layouts, plan.linears)
    return choice


def weights_cast_once(linears: LinearChoice, plan: Plan) -> frozenset[str]:
    """Return the names of the weights that are cast to float8 with one scale for the whole matrix."""
    if plan.linears is None or not RECIPES[plan.linears].casts_weight_once:
        return frozenset()
    return frozenset(join(path, "weight") for path in linears.chosen)


def assumed_costs(sequence: LayerSequence, output_linear: str | None) -> LayerCosts:
    """Return each layer's relative costs as assumed without measurements, in thirds for `F`, `I` and `W`.

    Forward and backward of `output_linear` count as input gradient (`I`).
    """
    costs = LayerCosts.evenly(layer_costs(sequence.layers))
    if output_linear is None:
        return costs
    linear = cast(nn.Linear, sequence.layers[-1].module.get_submodule(output_linear))
    return costs.in_input_gradient(-1, linear.weight.numel())


def recompute_per_layer(plan: Plan, layers: int) -> tuple[Recompute, ...]:
    """Return the recompute mode of each layer. Raises PlanError if the plan gives another number of modes."""
    if isinstance(plan.recompute, str):
        return (plan.recompute,) * layers
    if len(plan.recompute) != layers:
        raise PlanError(
            f"plan.recompute has {len(plan.recompute)} values, but the model has {layers} layers: "
            "give one value per layer, or one for all."
        )
    return plan.recompute


def units_of(
    sequence: LayerSequence,
    summed: Mapping[str, int],
    plan: Plan,
    cast_once: Collection[str] = (),
    known: KnownParts | None = None,
) -> dict[str, UnitSpec]:
    """Return how each unit (parameters gathered together) of a model is stored, gathered and reduced.

    `summed`: over how many `tp` ranks each gradient is summed. `cast_once`: the weights that linears take in
    float8 with one scale. `known`: see `build_blueprint`.
    """
    known = KnownParts() if known is None else known
    of_experts = known.part(parameters_of_experts, sequence)
    if plan.divides_experts and not of_experts:
        raise PlanError(
            f"plan.ep is {plan.ep} and plan.etp {plan.etp}, but the model has no experts "
            "(plait.MixtureOfExperts): set both to 1."
        )
    parameters = {
        name: ModelParameter(
            named_dtype(one.dtype),
            one.is_floating_point(),
            one.requires_grad,
            summed[name],
            is_expert=id(one) in of_experts,
            is_summed_over_etp=of_experts.get(id(one), False),
            takes_float8=name in cast_once,
        )
        for name, one in sequence.parameters.items()
    }
    members = sequence.units
    users = {unit: sequence.users[names[0]] for unit, names in members.items()}
    return resolve_units(plan, parameters, members, users)


def parameters_of_experts(sequence: LayerSequence) -> dict[int, bool]:
    """Return by the `id` of each parameter of experts whether its gradient is summed over `etp`."""
    return {
        id(parameter): name in module.summed_over_etp
        for layer in sequence.layers
        for _, module in experts_in(layer.module)
        for name, parameter in module.named_parameters()
    }


def rules_of_partitioned_modules(
    model: nn.Module, rules: Rules | None, plan: Plan, sequence: LayerSequence
) -> dict[str, Rule]:
    """Return the rule of each partitioned module. Raises PlanError where `tp` > 1 and there are no rules."""
    if plan.tp == 1:
        if rules is not None:
            match_modules(rules, named(sequence.layers))  # raises for rules that are wrong
        return {}
    chosen = chosen_rules(model, rules)
    if chosen is None:
        raise PlanError(
            f"plan.tp is {plan.tp}, but the model has no rules for tensor parallelism: give parallelize "
            f"{_as_layers(model) or 'rules, such as plait.models.gpt2.RULES'}, or set plan.tp to 1."
        )
    matched = match_modules(chosen, named(sequence.layers))
    if not plan.cuts_sequence:
        return {path: rule for path, rule in matched.items() if rule.kind != "sequence"}
    if all(rule.kind != "sequence" for rule in matched.values()):
        raise PlanError(
            f"plan.sequence_parallel is {plan.sequence_parallel!r}, but no layer has the rule sequence: give "
            "it to layers that work on each position by itself outside of their regions, or choose 'none'."
        )
    return matched


def _as_layers(model: nn.Module) -> str:
    """Return the call that makes layers, with rules, of a model of transformers; "" for other models."""
    is_of_transformers = type(model).__module__.partition(".")[0] == "transformers"
    return "plait.models.from_huggingface(model)" if is_of_transformers else ""


def chosen_rules(model: nn.Module, rules: Rules | None) -> Rules | None:
    """Return `rules`, or the model's own (`model.rules`, or None) where `rules` is None."""
    return getattr(model, "rules", None) if rules is None else rules


def parameter_layouts(
    sequence: LayerSequence, module_rules: Mapping[str, Rule], plan: Plan
) -> tuple[dict[str, Layout], dict[str, int]]:
    """Return each parameter's layout over tp, ep and etp, and how many `tp` ranks sum its gradient."""
    layers, sizes = named(sequence.layers), sizes_of_plan(plan)
    layouts = layouts_of(layers, module_rules, layout_degrees(sizes), layout_degrees(sizes, experts=True))
    summed = summed_over_tp(layers, module_rules, layouts)
    names = {name: id(parameter) for name, parameter in sequence.parameters.items()}
    return (
        {name: layouts[parameter] for name, parameter in names.items()},
        {name: summed[parameter] for name, parameter in names.items()},
    )
