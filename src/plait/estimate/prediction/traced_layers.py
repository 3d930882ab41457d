"""`TracedLayers`: the layers of any model, run on the meta device: operations, memory and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil, gcd
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plait.engine.blueprint import Blueprint, KnownParts, build_blueprint
from plait.engine.local_batch import DOCUMENT_IDS
from plait.estimate.memory.microbatch_memory import MicrobatchMemory, microbatch_memory
from plait.estimate.memory.model_traces import FIRST, KnownTraces, ModelTraces
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.estimate.memory.whole_parameter_owners import Moments, muon_of, tensor_counts
from plait.estimate.time.layer_work import LayerWork, MicrobatchSizes, extrapolated, with_mean_casts
from plait.optimizers.predicted_owner_work import found_matrices
from plait.plan.decoder_sizes import LayerKind
from plait.plan.parameter_units import FLOAT8, ModelParameter, kind_of
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import StageCut, schedule_and_cut
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.experts.experts import Experts
from plait.tensor.losses import Loss
from plait.tensor.nested_values import Value, map_tensors

Counted = Literal["experts", "float8"]
FEW_ROWS = (2, 3)
"""Rows of a micro-batch for which layers run; what more rows need follows from them, linearly. With one row
layers run apart: some copy what is contiguous then."""


@dataclass(frozen=True, eq=False)
class TracedLayers:
    """Runs a model's layers on the meta device, to know their operations, memory and parameters.

    Those of equal structure run once for each division over `tp`, `cp`, `ep` and `etp`. What is known is
    kept, so that plans with equal layers share it.
    """

    module: nn.Module
    inputs: Value
    """A batch of any number of rows, on any device; only shapes and dtypes are read."""
    targets: Value | None
    loss: Loss
    rules: Rules | None
    moments: Moments
    """How many tensors of a parameter's size the optimizer keeps for it."""
    parts: KnownParts = field(default_factory=KnownParts)
    """What blueprints of the model have in common."""
    _order_of: Callable[..., tuple[Schedule, StageCut]] = field(
        default_factory=lambda: cache(schedule_and_cut)
    )
    _traces: dict[Any, ModelTraces] = field(default_factory=dict)
    _layer_traces: dict[Any, KnownTraces] = field(default_factory=dict)
    _by_rows: dict[tuple[Plan, int, bool], ModelTraces] = field(default_factory=dict)
    _microbatches: dict[tuple[Plan, int, bool], MicrobatchMemory] = field(default_factory=dict)
    _blueprints: dict[Plan, Blueprint] = field(default_factory=dict)
    _counts: dict[tuple[object, ...], int] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer: named by the first layer that has the same structure and inputs."""
        traces = self.traces(Plan(), 1, on_cpu=True).layers
        first = {id(trace): number for number, trace in reversed([*enumerate(traces[:-1])])}
        last = len(traces) - 1  # with the loss
        return (*(f"layer {first[id(trace)]}" for trace in traces[:-1]), f"layer {last}")

    @cached_property
    def mean_moments(self) -> float:
        """State tensors of a parameter's size that the optimizer keeps: the mean over all elements."""
        if isinstance(self.moments, int):
            return self.moments
        muon, blueprint = muon_of(self.moments), self.blueprint(Plan())
        if muon is None:
            return 0.0  # its owners keep the state
        counts, parameters = tensor_counts(found_matrices(blueprint, muon)), blueprint.sequence.parameters
        kept = sum(count * parameters[name].numel() for name, count in counts.items())
        return kept / max(1, sum(parameters[name].numel() for name in counts))

    @cached_property
    def experts(self) -> int:
        """The most experts that a layer has; 0 without any."""
        return max((one.num_experts for one in self.module.modules() if isinstance(one, Experts)), default=0)

    def blueprint(self, plan: Plan) -> Blueprint:
        """Return the `Blueprint` of the model under `plan`, with one stage and one replica; made once.

        Stages and replicas do not change layers. It has as many data-parallel ranks as the division of
        experts needs, and two micro-batches where the plan's further ones may use what the first has cast.
        """
        if plan in self._blueprints:
            return self._blueprints[plan]
        alone = replace(
            plan,
            pp=1,
            dp=plan.ep * plan.etp // gcd(plan.ep * plan.etp, plan.cp * plan.tp),
            replicate=1,
            microbatches=2 if _keeps_casts(plan) else 1,
            schedule="1f1b",
            chunks=None,
            layers_per_stage=None,
            memory_limit=None,
            strategy="none",
            reduce="last",
            offload="none",
        )
        if alone not in self._blueprints:
            kept = replace(alone, recompute="none")
            if kept not in self._blueprints:
                self._blueprints[kept] = build_blueprint(self.module, kept, self.rules, known=self.parts)
            self._blueprints[alone] = self._blueprints[kept].recomputing(alone.recompute)
        self._blueprints[plan] = self._blueprints[alone]
        return self._blueprints[plan]

    def traces(self, plan: Plan, rows: int, *, on_cpu: bool) -> ModelTraces:
        """Return what each layer computes, allocates and saves for a micro-batch of `rows` rows."""
        blueprint = self.blueprint(plan)
        key = blueprint.plan, rows, on_cpu
        if key not in self._by_rows:
            every = rows * blueprint.plan.microbatches
            found = self.estimator(every, on_cpu=on_cpu).known_traces(blueprint)
            assert found is not None
            self._by_rows[key] = found
        return self._by_rows[key]

    def microbatch(self, plan: Plan, rows: int, *, on_cpu: bool) -> MicrobatchMemory:
        """Return the activation memory of a micro-batch of `rows` rows that runs through all layers alone."""
        key = self.blueprint(plan).plan, rows, on_cpu
        if key not in self._microbatches:
            self._microbatches[key] = microbatch_memory(self.traces(plan, rows, on_cpu=on_cpu))
        return self._microbatches[key]

    def estimator(self, rows: int, *, on_cpu: bool) -> MemoryEstimator:
        """Return an estimator of memory for `rows` rows per data-parallel rank; traces are shared."""
        return MemoryEstimator(
            self.module,
            of_rows(self.inputs, rows),
            None if self.targets is None else of_rows(self.targets, rows),
            self.loss,
            self.rules,
            None,
            self.moments,
            torch.device("cpu" if on_cpu else "cuda"),
            self._traces,
            self._layer_traces,
            self.parts,
            records=True,
            order_of=self._order_of,
        )

    def parameters(
        self, plan: Plan, kinds: Sequence[LayerKind], trains: Collection[bool], only: Counted | None = None
    ) -> int:
        """Return the number of parameters of several layers on the first rank of a stage, in elements.

        `trains`: count those that train, or do not, or both. Those that layers share count once. `only`:
        count those of experts, or weights of linears in float8 that have one scale each.
        """
        key = (plan.tp, plan.ep, plan.etp, plan.linears, tuple(kinds), only, *trains)
        if key not in self._counts:
            blueprint = self.blueprint(plan)
            names = {id(one): name for name, one in blueprint.sequence.parameters.items()}
            shared = {name for name, users in blueprint.sequence.users.items() if len(users) > 1}
            total, seen = 0, set[str]()
            for kind in kinds:
                module = blueprint.sequence.layers[self.kinds.index(kind)].module
                counted = [one for _, one in experts_in(module)] if only == "experts" else [module]
                for name in (names[id(one)] for part in counted for one in part.parameters()):
                    leaves_out = only == "float8" and name not in blueprint.float8_weights
                    if (
                        blueprint.kinds[name].trains in trains
                        and not leaves_out
                        and name not in seen & shared
                    ):
                        total += torch.Size(blueprint.whole_layouts[name].local_shape(FIRST)).numel()
                    seen.add(name)
            self._counts[key] = total
        return self._counts[key]


@dataclass(frozen=True, eq=False)
class TracedSizes(MicrobatchSizes):
    """Sizes and operations of a micro-batch under a plan, from traces of the model's layers."""

    layers: TracedLayers
    plan: Plan
    rows: float
    on_cpu: bool
    moments: float

    def work(self, kind: LayerKind) -> LayerWork:
        """Return the operations and collectives of a layer of `kind`, on the first rank of `tp`."""
        if self.rows <= FEW_ROWS[0]:
            return self._work(kind, ceil(self.rows))
        few, more = (self._work(kind, rows) for rows in FEW_ROWS)
        try:
            return cast(LayerWork, extrapolated(few, more, self.rows - FEW_ROWS[0]))
        except ValueError:  # it does something else with more rows
            return self._work(kind, ceil(self.rows))

    def _work(self, kind: LayerKind, rows: int) -> LayerWork:
        """Return the work for a number of rows, with what each of the plan's recomputations repeats."""
        number, given = self.layers.kinds.index(kind), self.plan.recompute
        modes = given if isinstance(given, tuple) else (given,)
        traces = {mode: self._traces(replace(self.plan, recompute=mode), rows) for mode in ("none", *modes)}
        works = {
            mode: with_mean_casts(one.works[number], one.first_works[number], self.plan.microbatches)
            for mode, one in traces.items()
        }
        again = {mode: getattr(work, mode) for mode, work in works.items() if mode != "none"}
        return replace(works["none"], **again)

    def parameters(self, kind: LayerKind) -> float:
        """Return the number of parameters of a layer of `kind` on the first rank of `tp`."""
        return self.layers.parameters(self.plan, (kind,), (True, False))

    def expert_parameters(self, kinds: Sequence[LayerKind], trains: Collection[bool] = (True,)) -> float:
        """Return how many parameters of several layers on a rank belong to experts that the plan divides."""
        if not self.plan.divides_experts:
            return 0.0
        return self.layers.parameters(self.plan, kinds, trains, "experts")

    def trained_parameters(self, kinds: Sequence[LayerKind]) -> float:
        """Return how many parameters of several layers train on a rank of `tp`; shared ones count once."""
        return self.layers.parameters(self.plan, kinds, (True,))

    def frozen_parameters(self, kinds: Sequence[LayerKind]) -> float:
        """Return how many parameters of several layers do not train on a rank of `tp`; shared ones once."""
        return self.layers.parameters(self.plan, kinds, (False,))

    def gathered_item(self, kinds: Sequence[LayerKind] | None = None) -> float:
        """Return the mean bytes of one parameter element when gathered, over some layers or (None) all.

        Counted without those of experts, which are not gathered in float8.
        """
        layers = self.layers
        if not kind_of(self.plan, ModelParameter(takes_float8=True)).scaled:
            return self.item
        kinds = tuple(kinds or layers.kinds)
        every = layers.parameters(self.plan, kinds, (True, False))
        every -= layers.parameters(self.plan, kinds, (True, False), "experts")
        in_float8 = layers.parameters(self.plan, kinds, (True, False), "float8")
        return self.item - (self.item - FLOAT8.itemsize) * in_float8 / max(every, 1)

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of a message between stages: the most between two layers."""
        return self.extrapolated(attrgetter("largest_output"))

    @cached_property
    def activations(self) -> MicrobatchMemory:
        """A lower bound of one micro-batch's activation bytes in all layers, extrapolated from few rows.

        Layers run as under strategy `none`, which may cast weights that others have in float8: then backwards
        are counted with what is kept only.
        """
        rows = FEW_ROWS if self.rows > FEW_ROWS[0] else (ceil(self.rows),)
        found = [self.layers.microbatch(self.plan, one, on_cpu=self.on_cpu) for one in rows]
        least = found[0] if len(found) == 1 else found[0].further(found[1], self.rows - FEW_ROWS[0])
        plans = self.layers.blueprint(self.plan).plan, self.plan
        traced, own = (kind_of(plan, ModelParameter(takes_float8=plan.linears is not None)) for plan in plans)
        return least if traced.scaled == own.scaled else replace(least, backward=least.kept[1:])

    @cached_property
    def loss_bytes(self) -> float:
        """A lower bound of the bytes that the loss allocates beside saved tensors, traced for few rows."""
        return self._traces(self.plan, ceil(min(self.rows, FEW_ROWS[0]))).loss_bytes

    def _traces(self, plan: Plan, rows: int) -> ModelTraces:
        return self.layers.traces(plan, rows, on_cpu=self.on_cpu)

    def extrapolated(self, number: Callable[[ModelTraces], float]) -> float:
        """Return `number(traces)` for this micro-batch's rows, extrapolated from traces of few rows."""
        if self.rows <= FEW_ROWS[0]:
            return number(self._traces(self.plan, ceil(self.rows)))
        few, more = (number(self._traces(self.plan, rows)) for rows in FEW_ROWS)
        return few + (self.rows - FEW_ROWS[0]) * (more - few)


def _keeps_casts(plan: Plan) -> bool:
    """Return whether experts' matrices are cast to float8 once a step, and not in each micro-batch."""
    return plan.linears is not None and plan.microbatches > 1 and kind_of(plan).keeps_parameters


def of_rows(batch: Value, rows: int) -> Value:
    """Return empty tensors on the meta device like a batch's, with `rows` rows.

    Ids of packed documents keep their values, where they have any: rows of the batch, again and again.
    """
    made = map_tensors(lambda one: torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta"), batch)
    ids = batch.get(DOCUMENT_IDS) if isinstance(batch, dict) else None
    if isinstance(ids, Tensor) and not ids.is_meta:
        made[DOCUMENT_IDS] = ids[torch.arange(rows) % len(ids)]
    return made
