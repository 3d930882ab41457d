"""`PlanMemories`: the memory of many plans of one model, which a search and a prediction ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from plait.estimate.time.layer_work import MicrobatchSizes
from plait.plan.plan import Plan
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import LayerCosts, schedule_and_cut


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes that a rank of `pp` allocates at the peak of a step, by use."""

    parameters: float
    gradients: float
    """Kept ones, and whole ones beside shards of them, where those are allocated at the peak."""
    optimizer: float
    activations: float
    """What unfinished micro-batches keep for their backward, and messages, when the action starts in which
    memory peaks."""
    temporary: float
    """What that action allocates beside it, and gathered parameters."""
    reserved: float
    """Memory of the driver, of communicators and of fragmentation, which no tensor allocates."""

    @property
    def allocated(self) -> float:
        """The sum of all but `reserved`."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class CutPipeline:
    """A schedule, with the cut of the model into its stages."""

    schedule: Schedule
    cut: tuple[int, ...]
    """The number of layers of each stage."""


def cut_pipeline(plan: Plan, costs: LayerCosts) -> CutPipeline:
    """Return the schedule of a plan, and the cut that it gives or that `costs` of the layers make best."""
    schedule, cut = schedule_and_cut(
        plan.schedule,
        costs,
        ranks=plan.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        limit=plan.memory_limit,
        cut=plan.layers_per_stage,
    )
    return CutPipeline(schedule, cut)


class PlanMemories(ABC):
    """Computes the memory of plans of one model; what several plans share is computed once."""

    @abstractmethod
    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return bytes that some rank must allocate under a policy (None: any), however the model is cut.

        `gathered`: count what plans with more copies of state need less of: buffers for whole parameters,
        and shards of gradients beside whole ones.
        """

    @abstractmethod
    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float | None:
        """Return the most bytes that a rank allocates, or None where it takes long to know, see `ranks`."""

    @abstractmethod
    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank of `pp`; `reserved`: bytes that no tensor allocates."""
