"""`TracedMemories`: the memory of plans of any model, from traces of its layers and simulated steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from plait.estimate.memory.memory_bounds import WARM
from plait.estimate.memory.memory_ledger import Category
from plait.estimate.memory.memory_report import RankMemory
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, PredictedMemory
from plait.estimate.memory.state_memory import ParameterCounts, state_bytes, whole_gradients
from plait.estimate.prediction.traced_layers import TracedLayers, TracedSizes
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.plan.decoder_sizes import LayerKind
from plait.schedules.action import Action, Kind

SIMULATED = 4
"""Up to so many micro-batches for each stage are simulated: more add only to the memory of the batch."""


@dataclass(frozen=True, eq=False)
class TracedMemories(PlanMemories):
    """Predicts the memory of plans as `plait.memory` does: it simulates the allocations of a step."""

    layers: TracedLayers
    _known: dict[tuple[object, ...], tuple[PredictedMemory, ...]] = field(default_factory=dict)

    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return a lower bound of the largest rank's bytes: the ranks' mean of state and saved tensors.

        The larger of two: when the last stage computes the loss of the first micro-batch or the backward of
        its last layer, and all ranks keep what its layers save, with some policies of as many micro-batches
        as there are stages behind; and after a backward, when whole gradients are allocated where they are
        reduced at the end of a step.
        """
        assert isinstance(sizes, TracedSizes)
        plan, alone = sizes.plan, sizes.activations
        saved, most = alone.kept[-1], max(_in_loss(sizes), alone.backward[-1])
        if plan.pp == 1:
            most = max(most, *alone.backward)
        found, added = self._state(sizes, self.layers.kinds, gathered=gathered)
        before = (found + most) / plan.pp
        if policy in WARM:  # rank r holds p − r micro-batches: see `MemoryBounds`
            held = [min(plan.microbatches, plan.pp - rank) for rank in range(plan.pp)]
            ends = (found + most - saved) / held[0]
            before = max(before, (saved + ends) / sum(1 / count for count in held))
        again = most if plan.pp == 1 else 0.0  # in the next micro-batch
        return max(before, (found + added + again) / plan.pp) if added else before

    def _state(
        self, sizes: TracedSizes, kinds: Sequence[LayerKind], *, gathered: bool = True
    ) -> tuple[float, float]:
        """Return the least bytes of the state of layers on a rank, and of whole gradients after a backward.

        `gathered`: see `least`. What is offloaded is not counted.
        """
        plan = sizes.plan
        if plan.offload != "none":
            return 0.0, 0.0
        trained, frozen = sizes.trained_parameters(kinds), sizes.frozen_parameters(kinds)
        of_experts, frozen_experts = (sizes.expert_parameters(kinds, (trains,)) for trains in (True, False))
        found = added = 0.0
        for learning, fixed, ranks in (
            (trained - of_experts, frozen - frozen_experts, sizes.state_ranks),
            (of_experts, frozen_experts, sizes.expert_state_ranks),
        ):
            counts = ParameterCounts(learning, 0.0, 0.0)
            parameters, gradients, optimizer, _ = state_bytes(sizes, counts, ranks, kinds)
            found += parameters + gradients * gathered + optimizer
            found += fixed * sizes.item / (1 if sizes.kind.keeps_parameters else ranks)
            if plan.microbatches > 1 and ranks > 1:
                added += whole_gradients(sizes, counts, splits=False).always
        return found, added

    def least_of_cut(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float:
        """Return a lower bound of the largest rank's bytes: its state, and what its layers keep.

        Each action of a rank starts with what its earlier ones keep of other micro-batches.
        """
        assert isinstance(sizes, TracedSizes)
        if not isinstance(self.layers.moments, int) and sizes.plan.pp > 1:
            sizes = replace(sizes, moments=0.0)  # that of some layers may be less than the mean
        schedule, bounds = pipeline.schedule, [*accumulate(pipeline.cut, initial=0)]
        most = 0.0
        for rank, actions in enumerate(schedule.actions):
            spans = {stage: slice(*bounds[stage : stage + 2]) for stage in schedule.stages_of(rank)}
            kinds = [kind for span in spans.values() for kind in self.layers.kinds[span]]
            state, added = self._state(sizes, kinds)
            most = max(most, state + _most_kept(sizes, actions, spans, added))
        return most

    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> None:
        """Return None: the memory of a plan is only known from a simulated step."""

    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each pipeline rank, from a simulated step of all or some micro-batches."""
        assert isinstance(sizes, TracedSizes)
        key = sizes.plan, sizes.rows, sizes.on_cpu, pipeline.cut
        if key not in self._known:
            self._known[key] = self._ranks(sizes, pipeline)
        return tuple(replace(rank, reserved=reserved) for rank in self._known[key])

    def _ranks(self, sizes: TracedSizes, pipeline: CutPipeline) -> tuple[PredictedMemory, ...]:
        count, few = sizes.plan.microbatches, SIMULATED * pipeline.schedule.stages
        if count <= few + pipeline.schedule.ranks:
            return self._simulated(sizes, pipeline, count)
        more = few + pipeline.schedule.ranks
        pair = [self._simulated(sizes, pipeline, one) for one in (few, more)]
        factor = (count - few) / (more - few)
        return tuple(_further(one, two, factor) for one, two in zip(*pair, strict=True))

    def _simulated(
        self, sizes: TracedSizes, pipeline: CutPipeline, microbatches: int
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank in a step of so many micro-batches."""
        plan = replace(sizes.plan, microbatches=microbatches, layers_per_stage=pipeline.cut)
        estimator = self.layers.estimator(round(sizes.rows * microbatches), on_cpu=sizes.on_cpu)
        return tuple(map(_predicted, estimator.ranks(plan)))


def _in_loss(sizes: TracedSizes) -> float:
    """Return a lower bound of the bytes while the loss is computed, with what all layers keep till then."""
    return sizes.activations.kept[-1] + sizes.activations.output + sizes.loss_bytes


def _most_kept(
    sizes: TracedSizes, actions: Sequence[Action], spans: Mapping[int, slice], added: float
) -> float:
    """Return the most bytes of activations and whole gradients (`added`) at any action of a rank.

    `spans`: the layers of its stages. Whole gradients are there after the first backward of weights.
    """
    alone = sizes.activations
    kept, backward = dict[int, float](), dict[int, float]()
    for stage, span in spans.items():
        before = alone.kept[span.start]
        kept[stage] = alone.kept[span.stop] - before
        backward[stage] = max(alone.backward[span]) - before
    in_loss = _in_loss(sizes) - alone.kept[-1]
    held = most = whole = 0.0
    for stage, kind, _ in actions:
        now = 0.0
        if kind is Kind.F:
            held += kept[stage]
            now = in_loss if spans[stage].stop == len(alone.backward) else 0.0
        elif kind is not Kind.W:
            held -= kept[stage]
            now = backward[stage]
        most = max(most, whole + held + now)
        if kind in (Kind.W, Kind.B):
            whole = added
    return most


def _predicted(rank: RankMemory) -> PredictedMemory:
    used = rank.at_peak
    parameters, gradients, optimizer = (
        used[name] for name in (Category.PARAMETERS, Category.GRADIENTS, Category.STATE)
    )
    kept = sum(used[name] for name in (Category.ACTIVATIONS, Category.MESSAGES, Category.BATCH))
    running = rank.most - parameters - gradients - optimizer - kept
    return PredictedMemory(parameters, gradients, optimizer, kept, running, 0.0)


def _further(one: PredictedMemory, two: PredictedMemory, factor: float) -> PredictedMemory:
    """Return `one` plus `factor` times the difference to `two`, field by field."""
    pairs = ((getattr(one, part.name), getattr(two, part.name)) for part in fields(one))
    return PredictedMemory(*(first + factor * (second - first) for first, second in pairs))
