"""`PlanMemories`: interface that predicts the memory of many plans of one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from plait.estimate.time.layer_work import MicrobatchSizes
from plait.plan.plan import Plan
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import LayerCosts, schedule_and_cut


@dataclass(frozen=True)
class PredictedMemory:
    """The bytes that a rank of `pp` allocates at the peak of a step: parameters, gradients, and so on."""

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
        """Bytes allocated for tensors: the sum of all fields but `reserved`."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class CutPipeline:
    """A schedule, and how many layers each of its stages has."""

    schedule: Schedule
    cut: tuple[int, ...]
    """The number of layers of each stage."""


def cut_pipeline(plan: Plan, costs: LayerCosts) -> CutPipeline:
    """Return a plan's schedule and its layers per stage: those given, else the best ones at these `costs`."""
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
    """Interface that predicts the memory of many plans of one model; shared parts are computed once."""

    @abstractmethod
    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return a lower bound of the largest rank's bytes under a schedule policy (None: under any).

        `gathered`: count what plans with more copies of state need less of: buffers for whole parameters,
        and shards of gradients beside whole ones.
        """

    @abstractmethod
    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float | None:
        """Return the bytes of the rank that allocates most; None where only a simulation of a step tells."""

    def least_of_cut(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float:
        """Return a lower bound of the largest rank's bytes, given schedule and layers per stage."""
        return 0.0

    @abstractmethod
    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank of `pp`; `reserved`: bytes beside those of tensors."""
